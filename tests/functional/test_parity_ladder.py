"""The parity ladder: whatever the mesh, 5 steps give the loss, the gradient norm and the weights of one process.

Those are the steps of the meshes; for each option and family it is 2, of which the second has the momentum of the first
and experts chosen with a bias that moved, and where kernels are interpreted 1, whose gradients show in the weights.

Everything runs in float32 through `TrainStep.train_step`, on packed documents. What may differ between two meshes is
the order of float32 sums, 2**-24 = 6e-8 relative each: differences of up to 3e-7 were measured in loss and gradient
norm, and of up to 2e-6 in the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import titanlite.features.muon
from tests.functional.conftest import full_tensors
from titanlite.assemble import assemble, build_data
from titanlite.config.parallelism import Degrees

STEPS, FEW = 5, 2
RELATIVE_TOLERANCE = 1e-5  # 30 times what was measured
# AdamW moves a weight by up to lr = 5e-3 a step. With eps = 1e-5 a gradient's rounding error of about 5e-9 changes that
# by at most 5e-9 / 1e-5 of it: 5 steps * 5e-3 * 5e-4 = 1.25e-5.
WEIGHT_TOLERANCE = 1.25e-5

MUON = "--optimizer.name=Muon"
FAMILIES = {
    "qwen3_moe": ["--moe.expert_bias_update_rate=0.01"],
    "qwen3_tied": ["--model.name=qwen3"],
    "qwen3_bias": ["--model.name=qwen3", "--model.overrides.attention_bias=true"],
    "llama": ["--model.name=llama"],
    "dots1": ["--model.name=dots1", "--model.overrides.num_layers=3"],
    "glm4_moe": ["--model.name=glm4_moe"],
    "qwen2": ["--model.name=qwen2"],
    "deepseek_v3": ["--model.name=deepseek_v3", "--model.overrides.attention_bias=true"],
    "deepseek_v3_no_q_latent": ["--model.name=deepseek_v3", "--model.overrides.q_lora_rank=0"],
    "yarn": [
        "--model.name=qwen3",
        "--model.overrides.rope_scaling.rope_type=yarn",
        "--model.overrides.rope_scaling.factor=4",
        "--model.overrides.rope_scaling.original_max_position_embeddings=64",
    ],
    "flat": ["--moe.expert_bias_update_rate=0.01", "--model.overrides.num_layers=1"],
    "deep": ["--moe.expert_bias_update_rate=0.01", "--model.overrides.num_layers=5"],
    # Slowly: 8 layers at the others' learning rate make of rounding errors what the tolerance does not let pass.
    "deeper": ["--moe.expert_bias_update_rate=0.01", "--model.overrides.num_layers=8", "--optimizer.lr=1e-3"],
    "deep_dots1": ["--model.name=dots1", "--model.overrides.num_layers=5", "--moe.aux_loss_coeff=0.01"],
    "balance_losses": ["--moe.aux_loss_coeff=0.01", "--moe.z_loss_coeff=0.001"],
    # Shards of unequal size on dense and sparse mesh (66 rows, 6 experts, 310 tokens), some of them empty.
    "uneven": ["--model.overrides.num_experts=6", "--model.overrides.hidden_size=66"],
    # Fewer experts than ranks: FSDP splits each of them.
    "few_experts": ["--model.overrides.num_experts=2", "--model.overrides.top_k=1"],
    "dots1_balance_losses": [
        "--model.name=dots1",
        "--model.overrides.num_layers=3",
        "--moe.aux_loss_coeff=0.01",
        "--moe.z_loss_coeff=0.001",
    ],
}
FAMILIES |= {
    f"muon_{name}": [*FAMILIES[name], MUON]
    for name in ("qwen3_moe", "uneven", "few_experts", "dots1", "deep_dots1", "qwen3_tied", "deepseek_v3")
}
# A weight of 1 whatever the scores leaves the router a gradient of rounding errors, and Muon makes them a full step.
FAMILIES["muon_few_experts"] += ["--model.overrides.norm_topk_prob=false"]
FULL_AC = "--activation_checkpoint.mode=full"
SELECTIVE_AC = "--activation_checkpoint.mode=selective"
MANY = (
    4  # micro-batches, so that two stages have twice as many as they are; each of one sequence where ranks have fewer
)
ONCE = "--parallelism.fsdp_once_per_step=true"


def batch_sizes(degrees: Degrees, micro_batches: int) -> str:
    """8 sequences a step on every mesh, in so many micro-batches."""
    return f"--training.local_batch_size={max(1, 8 // degrees.dp // micro_batches)}"


@pytest.fixture(scope="module")
def reference_runs() -> dict[tuple[str, int], Any]:
    return {}


@pytest.fixture
def reference(warm_run: Callable[..., Any], reference_runs: dict[tuple[str, int], Any]) -> Callable[..., Any]:
    """`reference(family, steps)`: the run of one process, without checkpointing and accumulation; made only once."""

    def get(family: str, steps: int = FEW) -> Any:
        if (family, steps) not in reference_runs:
            overrides = [*FAMILIES[family], batch_sizes(Degrees(), 1)]
            reference_runs[family, steps] = warm_run(Degrees(), *overrides, steps=steps)[0]
        return reference_runs[family, steps]

    return get


@pytest.fixture
def compare(warm_run: Callable[..., Any], meshes: Mapping[str, Degrees], reference: Callable[..., Any]):
    """`compare(mesh, family, *overrides, micro_batches, steps)`: train on the mesh and hold it against one process."""

    def run(
        mesh: str, family: str, *overrides: str, micro_batches: int = 1, steps: int = FEW, train_run: Any = warm_run
    ) -> None:
        one, degrees = reference(family, steps), meshes[mesh]
        micro_batches *= max(1, degrees.pp // 2)
        ranks = train_run(degrees, *FAMILIES[family], batch_sizes(degrees, micro_batches), *overrides, steps=steps)
        for rank, many in enumerate(ranks):
            assert_same_initial_weights(one, many)
            assert many.losses == pytest.approx(one.losses, rel=RELATIVE_TOLERANCE), f"loss on rank {rank}"
            assert many.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE_TOLERANCE), f"norm on rank {rank}"
            assert many.tokens_per_expert == one.tokens_per_expert, f"counts on rank {rank}"
        assert_same_final_weights(one, ranks[0])

    return run


def assert_same_initial_weights(one: Any, many: Any) -> None:
    assert many.digests.keys() == one.digests.keys()
    different = [name for name in one.digests if many.digests[name] != one.digests[name]]
    assert not different, "initial weights are not bit-identical"


def assert_same_final_weights(one: Any, many: Any) -> None:
    assert many.weights.keys() == one.weights.keys()
    for name, expected in one.weights.items():
        exact = name.endswith((".expert_bias", ".inv_freq"))  # moved by signs of integers; never moved
        if name.endswith(".tokens_per_expert"):
            continue  # of this rank's latest micro-batch; the global counts are compared step by step
        tolerance = 0.0 if exact else WEIGHT_TOLERANCE
        torch.testing.assert_close(
            many.weights[name], expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


LADDER = ["FSDP4", "HSDP2x2", "TP2xFSDP2", "EP4", "EP2xFSDP2", "TP2xEP2", "TP2xEP4"]


@pytest.mark.parametrize("mesh", LADDER)
def test_mesh_trains_like_one_process(compare, mesh):
    compare(mesh, "qwen3_moe", steps=STEPS)


@pytest.mark.parametrize("mesh", ["HSDP2x2", "EP2xFSDP2", "TP2xEP4"])
def test_mesh_with_full_checkpointing_and_accumulation_trains_like_one_process(compare, mesh):
    compare(mesh, "qwen3_moe", FULL_AC, micro_batches=2)


@pytest.mark.parametrize("mesh", ["PP4", "PP2xFSDP2", "PP2xHSDP2", "PP2xTP2", "PP2xEP2", "PP2xTP2xEP2", "PP2xCP2"])
def test_pipeline_trains_like_one_process(compare, mesh):
    """Twice as many micro-batches as stages; of 5 layers one stage has one more than another."""
    compare(mesh, "deep", micro_batches=MANY, steps=STEPS)


@pytest.mark.parametrize(
    ("mesh", "family", "overrides"),
    [
        ("PP2xTP2xEP2", "deep", [SELECTIVE_AC]),
        ("PP2xEP2", "deep", ["--training.local_batch_size=4"]),  # one micro-batch: a stage waits for all others
        ("PP2xTP2xEP2", "dots1_balance_losses", []),  # the first stage has the dense layers
        ("PP2xFSDP2", "dots1", ["--parallelism.pipeline_parallel_layers=1,2"]),  # and no other
        ("PP2xFSDP2", "uneven", []),
        ("PP2xTP2", "deepseek_v3", []),
        ("PP2xTP2xEP2", "muon_dots1", []),
    ],
)
def test_pipeline_beside_everything_else_trains_like_one_process(compare, mesh, family, overrides):
    compare(mesh, family, *overrides, micro_batches=MANY)


@pytest.mark.parametrize(
    ("mesh", "family", "overrides"),
    [
        ("FSDP4", "deep", []),
        ("DDP4", "deep", []),
        ("TP2xEP4", "deep", [FULL_AC]),
        ("EP2xFSDP2", "dots1_balance_losses", [SELECTIVE_AC]),
        ("CP2xTP2", "deep", []),
        ("TP2xFSDP2", "qwen3_tied", []),
        ("PP2xTP2xEP2", "deep", []),
    ],
)
def test_gathered_and_reduced_once_per_step_it_trains_like_one_process(compare, mesh, family, overrides):
    compare(mesh, family, ONCE, *overrides, micro_batches=MANY)


@pytest.mark.parametrize(
    ("mesh", "family", "chunks", "overrides"),
    [
        ("PP4", "deeper", 2, []),
        ("PP2xHSDP2", "deep", 2, [SELECTIVE_AC]),
        ("PP2xHSDP2", "deeper", 4, [ONCE, FULL_AC]),
        ("PP2xFSDP2", "deep", 2, ["--training.local_batch_size=2"]),  # as many micro-batches as stages
        ("PP2xFSDP2", "deeper", 3, ["--parallelism.pipeline_parallel_layers=1,2,2,1,1,1"]),
        ("PP2xFSDP2", "deep", 2, ["--parallelism.fsdp_reshard_after_forward=never"]),
        ("PP2xTP2", "deep_dots1", 2, ["--parallelism.pipeline_parallel_layers=1,2,1,1"]),  # a chunk without experts
        ("PP2xTP2xEP2", "deep", 2, [FULL_AC]),
        ("PP2xEP2", "muon_deep_dots1", 2, [ONCE]),
        ("PP2xCP2", "deep", 2, []),
    ],
)
def test_chunks_of_stages_train_like_one_process(compare, mesh, family, chunks, overrides):
    compare(mesh, family, f"--parallelism.pipeline_parallel_chunks={chunks}", *overrides, micro_batches=MANY)


def test_selective_checkpointing_of_every_other_layer_changes_nothing(compare):
    """That of operators is in the rows below."""
    compare("TP2xEP4", "qwen3_moe", SELECTIVE_AC, "--activation_checkpoint.selective_ac_option=2", micro_batches=2)


@pytest.mark.parametrize("mesh", ["DDP4", "HSDP2x2xEP2", "HSDP2xTP2xEP2"])
def test_replication_beside_other_axes_trains_like_one_process(compare, mesh):
    compare(mesh, "qwen3_moe", micro_batches=2 if mesh == "HSDP2x2xEP2" else 1, steps=STEPS)


@pytest.mark.parametrize(
    ("mesh", "family"),
    [
        ("DDP4", "qwen3_moe"),
        ("HSDP2xTP2xEP2", "qwen3_moe"),
        ("EP2xFSDP2", "uneven"),
        ("TP2xEP2", "few_experts"),
        ("TP2xEP4", "dots1"),
        ("TP2xFSDP2", "qwen3_tied"),
    ],
)
def test_matrices_are_put_together_for_muon(compare, mesh, family):
    compare(mesh, f"muon_{family}", micro_batches=2 if mesh == "TP2xEP2" else 1)


def test_muon_takes_a_few_matrices_at_a_time(compare, train_run, monkeypatch):
    monkeypatch.setattr(titanlite.features.muon, "_ELEMENTS_AT_ONCE", 1000)  # before the ranks are forked
    compare("TP2xEP2", "muon_qwen3_moe", micro_batches=2, train_run=train_run)


def test_resharding_always_changes_nothing(compare):
    """Never is in the chunks of stages, and in what is gathered once per step."""
    compare("TP2xEP2", "qwen3_moe", "--parallelism.fsdp_reshard_after_forward=always")


def test_tied_qwen3_trains_like_one_process(compare, reference):
    compare("TP2xFSDP2", "qwen3_tied", FULL_AC, micro_batches=2)
    weights = reference("qwen3_tied").weights
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_llama_with_rope_scaling_and_without_qk_norm_trains_like_one_process(compare, reference):
    compare("TP2xFSDP2", "llama", SELECTIVE_AC)
    assert not any("q_norm" in name for name in reference("llama").weights)


def test_attention_bias_is_added_once_under_tensor_parallel(compare, reference):
    compare("TP2xFSDP2", "qwen3_bias")
    biases = [weight for name, weight in reference("qwen3_bias").weights.items() if name.endswith("o_proj.bias")]
    assert biases, "the model has no bias"
    assert all(bias.abs().max() > 1e-3 for bias in biases), "the biases did not move, so nothing was tested"


@pytest.mark.parametrize(("mesh", "family"), [("TP2xFSDP2", "qwen2"), ("TP2xEP2", "glm4_moe")])
def test_biases_on_queries_keys_and_values_alone_train_like_one_process(compare, reference, mesh, family):
    compare(mesh, family)
    biases = {name: weight for name, weight in reference(family).weights.items() if name.endswith("_proj.bias")}
    assert {name.split(".")[-2] for name in biases} == {"q_proj", "k_proj", "v_proj"}
    # That of the keys shifts all scores of a query alike, but for the rotation, and moves little.
    assert all(bias.abs().max() > 1e-3 for name, bias in biases.items() if "k_proj" not in name)


@pytest.mark.parametrize(
    ("mesh", "family", "overrides"),
    [
        ("TP2xEP4", "deepseek_v3", []),
        ("TP2xEP2", "deepseek_v3_no_q_latent", []),
        ("TP2xFSDP2", "muon_deepseek_v3", []),
    ],
)
def test_latent_attention_trains_like_one_process(compare, reference, mesh, family, overrides):
    compare(mesh, family, *overrides)
    names = {name.split(".")[-2] for name in reference(family).weights if "self_attn" in name}
    assert {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"} <= names
    assert ("q_a_proj" in names) == (family != "deepseek_v3_no_q_latent") == ("q_proj" not in names)


def test_sigmoid_router_with_groups_and_shared_experts_trains_like_one_process(compare, reference):
    compare("TP2xEP4", "dots1", FULL_AC)
    weights = reference("dots1").weights
    assert any("shared_experts" in name for name in weights)
    assert any(name.endswith("layers.0.mlp.gate_proj.weight") for name in weights), "the first layer is dense"


@pytest.mark.parametrize(
    ("mesh", "family"),
    [("TP2xEP2", "balance_losses"), ("TP2xFSDP2", "dots1_balance_losses")],
)
def test_balance_losses_train_like_one_process(compare, reference, mesh, family):
    compare(mesh, family, FULL_AC, micro_batches=2)
    # The loss is reported without them; that they are trained shows in the gradient.
    plain = reference("dots1" if family.startswith("dots1") else "qwen3_moe")
    assert reference(family).grad_norms[1] != pytest.approx(plain.grad_norms[1], rel=1e-4)


@pytest.mark.parametrize("mesh", ["EP2xFSDP2", "TP2xEP2"])
def test_uneven_shards_train_like_one_process(compare, mesh):
    compare(mesh, "uneven", FULL_AC, micro_batches=2 if mesh == "TP2xEP2" else 1)


@pytest.mark.parametrize("mesh", ["EP2xFSDP2", "TP2xEP2"])
def test_fewer_experts_than_ranks_train_like_one_process(compare, mesh):
    compare(mesh, "few_experts", micro_batches=2 if mesh == "EP2xFSDP2" else 1)


CONTEXT_MESHES = ["CP4", "CP2xFSDP2", "CP2xTP2", "CP2xEP2", "CP2xTP2xEP4", "HSDP2xCP2"]


@pytest.mark.parametrize("mesh", CONTEXT_MESHES)
def test_pieces_of_sequences_train_like_one_process(compare, mesh):
    compare(mesh, "qwen3_moe", steps=STEPS)


@pytest.mark.parametrize(
    ("mesh", "family", "overrides"),
    [
        ("CP2xTP2xEP4", "qwen3_moe", [SELECTIVE_AC, "--activation_checkpoint.selective_ac_option=op"]),
        ("CP2xTP2", "balance_losses", [FULL_AC]),
        ("CP4", "dots1_balance_losses", []),
        ("CP2xTP2xEP4", "deepseek_v3", [SELECTIVE_AC]),
        ("CP2xFSDP2", "qwen3_tied", [SELECTIVE_AC]),
        ("CP2xTP2", "qwen3_bias", []),
        ("CP2xFSDP2", "yarn", []),
        ("CP2xEP2", "uneven", []),
        ("CP2xTP2", "muon_qwen3_moe", []),
    ],
)
def test_pieces_of_sequences_beside_everything_else_train_like_one_process(compare, mesh, family, overrides):
    compare(mesh, family, *overrides, micro_batches=1 if mesh == "CP4" else 2)


def test_the_row_of_the_padding_is_trained_on_no_mesh(checked, run_ranks, meshes):
    """`pad_token_id` of a frequent token, in the second half of the rows: its embedding begins and stays at 0."""
    for degrees in (Degrees(), meshes["TP2xFSDP2"]):
        job = checked(degrees, *FAMILIES["qwen3_bias"], "--model.overrides.tie_word_embeddings=false")
        _, loader = build_data(job.job, 0, 1)
        tokens = torch.cat([batch.tokens.flatten() for batch in loader.micro_batches(0)])
        padding = int(tokens[tokens >= job.model_config.vocab_size // 2].mode().values)
        config = replace(job.model_config, pad_token_id=padding)
        weight = run_ranks(degrees.world_size, partial(embedding_after_two_steps, replace(job, model_config=config)))[0]
        assert not weight[padding].any() and weight[padding - 1].any()


def embedding_after_two_steps(job):
    trainer = assemble(job)
    for step in range(2):
        trainer.stepper.train_step(trainer.loader.micro_batches(step))
    return full_tensors(trainer.model)["model.embed_tokens.weight"]


def test_ladder_measures_something(reference):
    """The loss falls, experts are unevenly used, and the bias moved."""
    one = reference("qwen3_moe", STEPS)
    assert one.losses[-1] < one.losses[0] - 0.1
    counts = torch.tensor(one.tokens_per_expert)
    assert counts.shape == (STEPS, 2, 8)
    assert (counts.sum(dim=-1) == 8 * 32 * 2).all(), "8 sequences of 32 tokens, 2 experts each"
    assert (counts.amax(dim=-1) > counts.amin(dim=-1)).all()
    bias = one.weights["model.layers.0.mlp.gate.expert_bias"]
    assert bias.isfinite().all() and bias.abs().max() > 0


def test_ladder_packs_several_documents_into_a_sequence(checked):
    _, loader = build_data(checked(Degrees()).job, 0, 1)
    batches = [batch for step in range(STEPS) for batch in loader.micro_batches(step)]
    several = torch.stack([batch.document_ids.max() > 0 for batch in batches])
    assert several.float().mean() > 0.3
    assert any((batch.labels == -100).any() for batch in batches)


def test_fused_kernels_train_like_one_process(compare):
    """Without a GPU they run in Triton's interpreter, which takes seconds a layer."""
    compare("TP2xEP2", "flat", "--moe.grouped_gemm=triton", steps=1)
