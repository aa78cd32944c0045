"""Frozen parameters and learning rates by pattern, on meshes and through a resume."""

import pytest
import torch

from tests.functional.conftest import assert_same_run, full_tensors, take_step, weekly
from titanlite.assemble import assemble, build_model
from titanlite.config.parallelism import Degrees
from titanlite.metrics.flops import train_flops_per_token
from titanlite.optim.optimizer import freeze_parameters

STEPS = 3
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


@pytest.mark.parametrize("mesh", ["TP2xEP2", weekly("FSDP4")])
def test_mesh_trains_like_one_process(warm_run, meshes, mesh):
    def run(degrees, *overrides):
        local = f"--training.local_batch_size={8 // degrees.dp // 2}"
        return warm_run(degrees, *PATTERNS, local, *overrides, steps=STEPS)

    ranks = run(meshes[mesh], "--activation_checkpoint.mode=full")
    # The tolerance is twice as large as in the parity ladder, as the learning rate is.
    assert_same_run(
        run(Degrees())[0], ranks, lambda name: 0.0 if is_frozen(name) else 2 * WEIGHT_TOLERANCE
    )


def test_frozen_stays_and_the_rest_moves(run_ranks, checked):
    job = checked(Degrees(dp_shard=2, ep=2), *PATTERNS, "--training.local_batch_size=4")
    config, seq_len = job.model_config, job.job.training.seq_len
    whole = build_model(config)
    freeze_parameters(whole, job.job.optimizer)
    flops = train_flops_per_token(whole, seq_len)
    assert flops < train_flops_per_token(build_model(config), seq_len)

    def rank_main():
        trainer = assemble(job)
        assert trainer.metrics._flops_per_token == flops, "on shards as on the whole model"
        before = full_tensors(trainer.model)
        take_step(trainer, 0)
        for name, param in trainer.model.named_parameters():
            assert (param in trainer.parts.stepper.optimizer.state) != is_frozen(name), name
        for name, value in full_tensors(trainer.model).items():
            if not name.endswith((".tokens_per_expert", ".inv_freq")):
                assert torch.equal(value, before[name]) == is_frozen(name), name

    run_ranks(2, rank_main)
