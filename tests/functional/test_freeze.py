"""Frozen parameters by pattern. The parity ladder trains them on meshes."""

import torch

from tests.functional.conftest import full_tensors, take_step
from tests.functional.test_parity_ladder import FAMILIES
from titanlite.assemble import assemble, build_model
from titanlite.config.parallelism import Degrees
from titanlite.metrics.flops import train_flops_per_token
from titanlite.optim.optimizer import freeze_parameters


def is_frozen(name):
    norm = name.startswith("model.layers.1.") and "norm" in name
    return (
        norm
        or "embed_tokens" in name
        or ".mlp.gate." in name
        or name.endswith(".0.mlp.experts.down_proj")
    )


def test_frozen_stays_and_the_rest_moves(run_ranks, checked):
    job = checked(Degrees(dp_shard=2, ep=2), *FAMILIES["frozen"], "--training.local_batch_size=4")
    config, seq_len = job.model_config, job.job.training.seq_len
    whole = build_model(config)
    freeze_parameters(whole, job.job.optimizer)
    flops = train_flops_per_token(whole, seq_len)
    assert flops < train_flops_per_token(build_model(config), seq_len)

    def rank_main():
        trainer = assemble(job)
        assert trainer.metrics.flops_per_token == flops, "on shards as on the whole model"
        before = full_tensors(trainer.model)
        take_step(trainer, 0)
        for name, param in trainer.model.named_parameters():
            assert (param in trainer.parts.stepper.optimizer.state) != is_frozen(name), name
        for name, value in full_tensors(trainer.model).items():
            if not name.endswith((".tokens_per_expert", ".inv_freq")):
                assert torch.equal(value, before[name]) == is_frozen(name), name

    run_ranks(2, rank_main)
