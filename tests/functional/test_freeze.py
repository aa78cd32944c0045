"""Frozen parameters and learning rates by pattern, on meshes and through a resume."""

import pytest
import torch

from titanlite.assemble import assemble, build_model
from titanlite.config.parallelism import Degrees
from titanlite.metrics.flops import train_flops_per_token
from titanlite.optim.optimizer import freeze_parameters

STEPS = 3
RELATIVE_TOLERANCE = 1e-5  # as in test_parity_ladder.py
WEIGHT_TOLERANCE = 1.25e-5
PATTERNS = [
    # One FSDP unit is partly frozen, another one wholly; experts on their own mesh are partly
    # frozen, and so are norms, which tp replicates.
    "--optimizer.freeze=model.embed_tokens*, *.mlp.gate.*, *.0.mlp.experts.down_proj, "
    "model.layers.1.*norm*",
    "--optimizer.lr_multipliers=lm_head*=0.5, *.experts.*=2",
]


def is_frozen(name):
    norm = name.startswith("model.layers.1.") and "norm" in name
    return (
        norm
        or "embed_tokens" in name
        or ".mlp.gate." in name
        or name.endswith(".0.mlp.experts.down_proj")
    )


@pytest.fixture(scope="module")
def reference_runs():
    return {}


@pytest.mark.parametrize("mesh", ["TP2xEP2", pytest.param("FSDP4", marks=pytest.mark.full)])
def test_mesh_trains_like_one_process(warm_run, meshes, reference_runs, mesh):
    def run(degrees, *overrides):
        local = f"--training.local_batch_size={8 // degrees.dp // 2}"
        return warm_run(degrees, *PATTERNS, local, *overrides, steps=STEPS)

    if not reference_runs:
        reference_runs["one"] = run(Degrees())[0]
    one = reference_runs["one"]
    ranks = run(meshes[mesh], "--activation_checkpoint.mode=full")
    for many in ranks:
        assert many.losses == pytest.approx(one.losses, rel=RELATIVE_TOLERANCE)
        assert many.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE_TOLERANCE)
    for name, expected in one.weights.items():
        if not name.endswith(".tokens_per_expert"):
            tolerance = 0.0 if is_frozen(name) else 2 * WEIGHT_TOLERANCE  # twice the learning rate
            torch.testing.assert_close(ranks[0].weights[name], expected, rtol=0, atol=tolerance)


def test_frozen_stays_and_the_rest_moves(run_ranks, checked, meshes, gather_full):
    job = checked(meshes["TP2xEP2"], *PATTERNS, "--training.local_batch_size=4")
    config, seq_len = job.model_config, job.job.training.seq_len
    whole = build_model(config)
    freeze_parameters(whole, job.job.optimizer)
    flops = train_flops_per_token(whole, seq_len)
    assert flops < train_flops_per_token(build_model(config), seq_len)

    def rank_main():
        trainer = assemble(job)
        assert trainer.metrics._flops_per_token == flops, "on shards as on the whole model"
        before = gather_full(trainer.model)
        trainer.parts.stepper.train_step(trainer.parts.loader.micro_batches(0))
        for name, param in trainer.model.named_parameters():
            assert (param in trainer.parts.stepper.optimizer.state) != is_frozen(name), name
        for name, value in gather_full(trainer.model).items():
            if not name.endswith((".tokens_per_expert", ".inv_freq")):
                assert torch.equal(value, before[name]) == is_frozen(name), name

    run_ranks(4, rank_main)
