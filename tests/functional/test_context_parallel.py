"""Context parallelism: a rank holds its part of each sequence, and whole sequences go in and come
out.

Parity with one process is tested in test_parity_ladder.py and in the tests of each feature.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config import ModelConfig
from titanlite.distributed.context_parallel import apply_context_parallel
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder

BATCH, SEQ_LEN, HEADS, LAYERS = 2, 16, 4, 2


def build():
    """Build a model with the same weights on every rank and in each call."""
    model = build_decoder(
        ModelConfig(
            vocab_size=50,
            hidden_size=24,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=32,
            num_experts=4,
            top_k=2,
            moe_intermediate_size=16,
            initializer_range=0.2,
        )
    )
    materialize(model, "cpu", seed=3)
    return model


def batch():
    """Return tokens, labels, positions and documents; the second row has two documents and
    padding.
    """
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 50, (BATCH, SEQ_LEN), generator=generator) for _ in range(2))
    documents = torch.tensor([[0] * SEQ_LEN, [0] * 5 + [1] * 8 + [-1] * 3])
    positions = torch.tensor([[*range(SEQ_LEN)], [*range(5), *range(8), *range(3)]])
    labels[documents < 0] = -100
    labels[0, 3] = -100
    return tokens, labels, positions, documents


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_a_rank_holds_its_piece_but_for_attention(run_ranks):
    """The two key/value heads are fewer than the ranks."""
    ranks = 4

    def rank_main():
        model = build()
        apply_context_parallel(model, dist.group.WORLD)  # type: ignore[arg-type]
        shapes = {}

        def record(kind):
            def before(_, args):
                shapes.setdefault(kind, set()).update(
                    tuple(x.shape) for x in args[:3] if isinstance(x, torch.Tensor)
                )

            return before

        for layer in model.decoder_layers():
            layer.register_forward_pre_hook(
                lambda _, args: shapes.setdefault("layer", set()).add(tuple(args[0].shape))
            )
            layer.mlp.register_forward_pre_hook(record("moe"))
            layer.self_attn.core_attention.register_forward_pre_hook(record("attention"))
        with Called() as forward:
            loss = model(*batch()).cross_entropy
        with Called() as backward:
            loss.backward()
        exchange = torch.ops.titanlite.all_to_all.default
        return shapes, forward.counts[exchange], backward.counts[exchange]

    for shapes, forward, backward in run_ranks(ranks, rank_main):
        piece, heads = SEQ_LEN // ranks, HEADS // ranks
        assert shapes["layer"] == {(BATCH, piece, 24)}
        assert shapes["moe"] == {(BATCH, piece, 24)}
        assert heads == 1 and shapes["attention"] == {(BATCH, SEQ_LEN, heads, 8)}
        assert forward == backward == 2 * LAYERS
