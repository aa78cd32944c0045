"""Context parallelism: a rank holds its part of each sequence, and whole sequences go in and come
out.

Parity with one process is tested in test_parity_ladder.py and in the tests of each feature.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.functional.conftest import forward_once
from titanlite.assemble import assemble


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_a_rank_holds_its_piece_but_for_attention(run_ranks, checked, meshes):
    """The two key/value heads are fewer than the ranks."""
    job = checked(meshes["CP4"])
    ranks = job.degrees.cp

    def rank_main():
        trainer = assemble(job)
        shapes = {}

        def record(kind, count):
            def before(_, args):
                shapes.setdefault(kind, set()).update(tuple(x.shape) for x in args[:count])

            return before

        for layer in trainer.model.decoder_layers():
            layer.register_forward_pre_hook(record("layer", 1))
            layer.mlp.register_forward_pre_hook(record("moe", 1))
            layer.self_attn.core_attention.register_forward_pre_hook(record("attention", 3))
        with Called() as forward:
            losses = forward_once(trainer)
        with Called() as backward:
            losses.cross_entropy.backward()
        exchange = torch.ops.titanlite.all_to_all.default
        return shapes, forward.counts[exchange], backward.counts[exchange]

    config, training = job.model_config, job.job.training
    rows, length, heads = training.local_batch_size, training.seq_len, config.num_heads // ranks
    for shapes, forward, backward in run_ranks(ranks, rank_main):
        piece = {(rows, length // ranks, config.hidden_size)}
        assert shapes["layer"] == shapes["moe"] == piece
        assert shapes["attention"] == {(rows, length, heads, config.head_dim)} and heads == 1
        assert forward == backward == 2 * config.num_layers
