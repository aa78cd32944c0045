"""Preference pairs packed by hand, and a direct implementation of DPO on a transformers model, one
document at a time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from titanlite.data.dataset import IGNORE_INDEX, Batch


class Document(NamedTuple):
    """`tokens` with the first `prompt` of them given."""

    tokens: list[int]
    prompt: int


def random_pairs(count, vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    def tokens(length):
        return torch.randint(vocab_size, (length,), generator=generator).tolist()

    pairs = []
    for _ in range(count):
        prompt = tokens(draw(1, 5))
        documents = [Document(prompt + tokens(draw(1, 5)), len(prompt)) for _ in range(2)]
        pairs.append((documents[0], documents[1]))
    return pairs


def pack(rows, seq_len):
    """Pack each list of pairs into one row: chosen, rejected, chosen, ... and padding."""
    columns = [[], [], [], []]
    for pairs in rows:
        row = [[], [], [], []]
        for number, document in enumerate(document for pair in pairs for document in pair):
            length = len(document.tokens)
            labels = [*document.tokens[1:], IGNORE_INDEX]
            labels[: document.prompt - 1] = [IGNORE_INDEX] * (document.prompt - 1)
            for part, values in zip(
                row, (document.tokens, labels, list(range(length)), [number] * length), strict=True
            ):
                part += values
        padding = seq_len - len(row[0])
        assert padding >= 0, "the pairs do not fit"
        for column, part, filler in zip(columns, row, (0, IGNORE_INDEX, 0, -1), strict=True):
            column.append(part + [filler] * padding)
    return Batch(*(torch.tensor(column) for column in columns))


def log_prob(model, document):
    """Return log p(answer | prompt) of a transformers model, with the document alone in a row."""
    tokens = torch.tensor([document.tokens])
    log_probs = F.log_softmax(model(tokens, use_cache=False).logits[0].float(), dim=-1)
    answer = range(document.prompt, len(document.tokens))
    return torch.stack([log_probs[i - 1, document.tokens[i]] for i in answer]).sum()


def direct_dpo(policy, reference, pairs, beta, smoothing):
    """Return the mean loss over the pairs and mean metrics; both models are of transformers."""
    losses, chosen, rejected = [], [], []
    for pair in pairs:
        rewards = [
            beta * (log_prob(policy, document) - log_prob(reference, document).detach())
            for document in pair
        ]
        margin = rewards[0] - rewards[1]
        losses.append(-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin))
        chosen.append(rewards[0].item())
        rejected.append(rewards[1].item())
    margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
    count = len(losses)
    return torch.stack(losses).mean(), {
        "rewards/chosen": sum(chosen) / count,
        "rewards/rejected": sum(rejected) / count,
        "rewards/margin": sum(margins) / count,
        "rewards/accuracy": sum(margin > 0 for margin in margins) / count,
    }
