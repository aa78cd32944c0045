"""The next token of each row, from its logits.

Shapes: B rows, V vocabulary, k tokens to choose from.
"""

import torch


def choose_tokens(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """One int64 token per row: the most likely one at temperature 0, else a draw by inverse cumulative sum.

    A function of its arguments alone: the randomness is `uniform_B`, so that a row's draw depends neither on the rows
    beside it nor on the device.

    Args:
        logits_BV: logits of any float dtype.
        uniform_B: numbers in [0, 1), one per row; unused at temperature 0.
        temperature: divides the logits.
        top_k: only the k most likely tokens can be drawn; 0: all.
        top_p: only the most likely tokens that together have this probability (arXiv:1904.09751); after `top_k`.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    device = logits_BV.device
    if torch.are_deterministic_algorithms_enabled():
        logits_BV = logits_BV.cpu()  # torch has no deterministic cumulative sum of floats on CUDA
    # The best one at 0, so that a temperature next to 0 leads to -inf for the others, and never to inf.
    logits_BV = (logits_BV.float() - logits_BV.amax(dim=-1, keepdim=True).float()) / temperature
    sorted_Bk, ids_Bk = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_Bk, ids_Bk = sorted_Bk[:, :top_k], ids_Bk[:, :top_k]
    # float64: in float32 the sum over a vocabulary of 150,000 is off by 1e-4, which would move the last draws.
    probs_Bk = sorted_Bk.double().softmax(dim=-1)
    cumulative_Bk = probs_Bk.cumsum(dim=-1)
    kept_B1 = (cumulative_Bk - probs_Bk < top_p).sum(dim=-1, keepdim=True)  # the one that crosses top_p included
    mass_B1 = cumulative_Bk.gather(1, kept_B1 - 1)
    target_B1 = uniform_B.to(mass_B1).unsqueeze(1) * mass_B1
    index_B1 = torch.minimum((cumulative_Bk <= target_B1).sum(dim=-1, keepdim=True), kept_B1 - 1)
    return ids_Bk.gather(1, index_B1).squeeze(1).to(device)
