"""Sample text from a sharded model: plain autoregression without a cache, for a look at what was learned."""

from typing import Any

import torch
import torch.distributed as dist

from titanlite.models.decoder import Decoder
from titanlite.models.transformers_model import TransformersModel


@torch.no_grad()
def generate(
    model: Decoder | TransformersModel,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    length_multiple: int,
    device: torch.device,
    temperature: float = 0.7,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """Continue `prompt` by up to `max_new_tokens` tokens and return prompt and continuation as text.

    The row is padded on the right to one fixed length, a multiple of `length_multiple` (the sequence is split over tp);
    a causal model does not see padding on the right. Rank 0 draws, so that all ranks continue with the same token.

    Collectives: one forward and one broadcast per token; every rank must call with the same arguments.
    """
    ids: list[int] = tokenizer.encode(prompt)
    length = -(-(len(ids) + max_new_tokens) // length_multiple) * length_multiple
    tokens_1S = torch.zeros(1, length, dtype=torch.int64, device=device)
    tokens_1S[0, : len(ids)] = torch.tensor(ids)
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for position in range(len(ids), len(ids) + max_new_tokens):
            logits_1SV = model(tokens_1S)
            logits_V = logits_1SV[0, position - 1, : len(tokenizer)].float().cpu() / temperature
            best_k = logits_V.topk(min(top_k, logits_V.numel()))
            choice = torch.multinomial(best_k.values.softmax(-1), 1, generator=generator)
            token = best_k.indices[choice].to(device)
            dist.broadcast(token, src=0)
            if token.item() == tokenizer.eos_token_id:
                break
            tokens_1S[0, position] = token
            ids.append(int(token.item()))
    finally:
        model.train(was_training)
    return tokenizer.decode(ids)
