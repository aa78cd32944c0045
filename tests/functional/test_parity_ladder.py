"""The parity ladder: whatever the mesh, 3 steps give the loss, the gradient norm and the weights of
one process.

Meshes are compared over 3 steps. Options and families take 2: the second step uses the momentum of
the first, and expert biases that have changed. Interpreted kernels take 1; its gradients show in
the weights.

Everything runs in float32 through `TrainStep.train_step`, on packed documents. Only the order of
float32 sums may differ between two meshes, and each sum has a relative error of 2**-24 = 6e-8. The
measured differences were up to 3e-7 in loss and gradient norm, and up to 2e-6 in the weights.
"""

from dataclasses import replace

import pytest
import torch

import titanlite.features.muon
from tests.functional.conftest import RELATIVE_TOLERANCE, assert_same_run, full_tensors, take_step
from titanlite.assemble import assemble, build_data
from titanlite.config.parallelism import Degrees

STEPS, FEW = 3, 2
# AdamW moves a weight by up to lr = 5e-3 a step. A gradient's rounding error of about 5e-9 changes
# this by at most the fraction 5e-9 / eps = 5e-4, where eps = 1e-5; in 3 steps by 3 * 5e-3 * 5e-4 =
# 7.5e-6.
WEIGHT_TOLERANCE = 7.5e-6

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
    "qwen3_next": ["--model.name=qwen3_next"],
    "ministral": ["--model.name=ministral"],
    "gpt_oss": ["--model.name=gpt_oss"],
    "olmo3": ["--model.name=olmo3"],
    "minimax_m2": ["--model.name=minimax_m2"],
    "ernie4_5_moe": ["--model.name=ernie4_5_moe"],
    "glm4_moe_lite": ["--model.name=glm4_moe_lite"],
    "solar_open": ["--model.name=solar_open"],
    "qwen3_5": ["--model.name=qwen3_5_text"],
    "qwen3_5_moe": ["--model.name=qwen3_5_moe_text"],
    "deepseek_v3_no_q_latent": ["--model.name=deepseek_v3", "--model.overrides.q_lora_rank=0"],
    "yarn": [
        "--model.name=qwen3",
        "--model.overrides.rope_scaling.rope_type=yarn",
        "--model.overrides.rope_scaling.factor=4",
        "--model.overrides.rope_scaling.original_max_position_embeddings=64",
    ],
    # small, for kernels that are interpreted
    "flat": [
        "--model.overrides.num_layers=1",
        "--model.overrides.num_experts=4",
        "--training.seq_len=16",
    ],
    "deep": ["--moe.expert_bias_update_rate=0.01", "--model.overrides.num_layers=5"],
    # One FSDP unit is partly frozen, another one wholly; experts on their own mesh are partly
    # frozen, and so are norms, which tp replicates.
    "frozen": [
        "--optimizer.freeze=model.embed_tokens*, *.mlp.gate.*, *.0.mlp.experts.down_proj, "
        "model.layers.1.*norm*",
        "--optimizer.lr_multipliers=lm_head*=0.5, *.experts.*=2",
    ],
    "no_balance": ["--moe.expert_bias_update_rate=none", "--moe.aux_loss_coeff=0"],
    # a balance loss, from random weights
    "default_balance": ["--moe.expert_bias_update_rate=none"],
    "balance_losses": ["--moe.aux_loss_coeff=0.01", "--moe.z_loss_coeff=0.001"],
    # Shards of unequal size on dense and sparse mesh (66 rows, 6 experts, 310 tokens), some of them
    # empty.
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
    for name in (
        "qwen3_moe",
        "uneven",
        "few_experts",
        "dots1",
        "qwen3_tied",
        "deepseek_v3",
        "qwen3_5",
    )
}
# Normalized, the weight of a single chosen expert is always 1, and the router's gradient is only
# rounding errors, which Muon would scale to a full step.
FAMILIES["muon_few_experts"] += ["--model.overrides.norm_topk_prob=false"]
OPTIONS = {
    "full_ac": "--activation_checkpoint.mode=full",
    "attention_kept": "--activation_checkpoint.mode=keep_attention",
    "selective_ac": "--activation_checkpoint.mode=selective",
    "every_second_layer": "--activation_checkpoint.selective_ac_option=2",
    "operators": "--activation_checkpoint.selective_ac_option=op",
    "once_per_step": "--parallelism.fsdp_once_per_step=true",
    "always": "--parallelism.fsdp_reshard_after_forward=always",
    "never": "--parallelism.fsdp_reshard_after_forward=never",
    "one_micro_batch": "--training.local_batch_size=4",  # a stage waits for all others
}


def batch_sizes(degrees, micro_batches):
    """Return the sizes for 8 sequences a step on every mesh, in `micro_batches` micro-batches."""
    return f"--training.local_batch_size={max(1, 8 // degrees.dp // micro_batches)}"


@pytest.fixture
def reference(warm_run, once):
    """`reference(family, steps)`: the run of one process, without checkpointing and
    accumulation.
    """

    def get(family, steps=FEW):
        overrides = [*FAMILIES[family], batch_sizes(Degrees(), 1)]
        return once((family, steps), lambda: warm_run(Degrees(), *overrides, steps=steps)[0])

    return get


@pytest.fixture
def compare(warm_run, meshes, reference):
    """`compare(mesh, family, *overrides, micro_batches, steps)`: train on the mesh and compare with
    one process.
    """

    def run(
        mesh,
        family,
        *overrides,
        micro_batches=1,
        steps=FEW,
        train_run=warm_run,
    ):
        one, degrees = reference(family, steps), meshes[mesh]
        micro_batches *= max(1, degrees.pp // 2)
        ranks = train_run(
            degrees, *FAMILIES[family], batch_sizes(degrees, micro_batches), *overrides, steps=steps
        )
        assert_same_run(one, ranks, tolerance_of)

    return run


def tolerance_of(name):
    # The bias moves by signs of integers, and inv_freq never changes.
    return 0.0 if name.endswith((".expert_bias", ".inv_freq")) else WEIGHT_TOLERANCE


# A mesh, a family, the micro-batches, and options by name or as they are written. The mesh of a
# `weekly` row, and each pair of its axes and features, stand in other rows, too: it runs with
# --full.
CASES = """
FSDP4          qwen3_moe               1 long
HSDP2x2        qwen3_moe               1 long weekly
TP2xFSDP2      qwen3_moe               1 long weekly
EP4            qwen3_moe               1 long weekly
EP2xFSDP2      qwen3_moe               1 long weekly
TP2xEP2        qwen3_moe               1 long weekly
TP2xEP4        qwen3_moe               1 long weekly
HSDP2x2        qwen3_moe               2 full_ac
EP2xFSDP2      qwen3_moe               2 full_ac weekly
TP2xEP4        qwen3_moe               2 full_ac weekly
TP2xEP4        qwen3_moe               2 selective_ac every_second_layer
DDP4           qwen3_moe               1 long weekly
HSDP2x2xEP2    qwen3_moe               2 long
HSDP2xTP2xEP2  qwen3_moe               1 long weekly
TP2xFSDP2      qwen3_tied              2 full_ac weekly
TP2xFSDP2      llama                   1 selective_ac weekly
TP2xFSDP2      qwen3_bias              1 weekly
TP2xFSDP2      qwen2                   1 weekly
TP2xEP2        glm4_moe                1
TP2xEP4        deepseek_v3             1 weekly
TP2xEP2        deepseek_v3_no_q_latent 1
FSDP4          qwen3_next              1 weekly
TP2xFSDP2      qwen3_next              1 selective_ac weekly
EP2xFSDP2      qwen3_next              2 full_ac
TP2xFSDP2      ministral               2 full_ac weekly
FSDP4          gpt_oss                 1 weekly
TP2xFSDP2      olmo3                   2 selective_ac weekly
TP2xEP2        minimax_m2              1 always
TP2xEP2        ernie4_5_moe            1
TP2xEP2        glm4_moe_lite           1 full_ac
EP4            solar_open              2
TP2xFSDP2      gpt_oss                 1 selective_ac operators
EP2xFSDP2      gpt_oss                 2 attention_kept
FSDP4          qwen3_5                 1 weekly
TP2xFSDP2      qwen3_5                 1 attention_kept weekly
EP2xFSDP2      qwen3_5_moe             2 selective_ac weekly
TP2xEP2        qwen3_5_moe             1
TP2xEP2        frozen                  2 full_ac
FSDP4          frozen                  2 full_ac weekly
TP2xEP4        dots1                   1 attention_kept weekly
TP2xEP2        balance_losses          2 full_ac weekly
TP2xFSDP2      dots1_balance_losses    2 full_ac weekly
EP2xFSDP2      uneven                  1 full_ac weekly
TP2xEP2        uneven                  2 full_ac weekly
EP2xFSDP2      few_experts             2 weekly
TP2xEP2        few_experts             1 weekly

PP4            deep                    4
PP2xFSDP2      deep                    4 long weekly
PP2xHSDP2      deep                    4 long weekly
PP2xTP2        deep                    4 long weekly
PP2xEP2        deep                    4 long weekly
PP2xTP2xEP2    deep                    4 long weekly
PP2xCP2        deep                    4
PP2xEP2        deep                    4 one_micro_batch
PP2xHSDP2      deep                    4 once_per_step attention_kept
PP2xTP2xEP2    dots1_balance_losses    4 weekly
PP2xFSDP2      dots1                   4 --parallelism.pipeline_parallel_layers=1,2 never
PP2xFSDP2      uneven                  4 weekly
PP2xTP2        deepseek_v3             4 weekly
PP2xFSDP2      qwen3_next              4 weekly
PP2xFSDP2      gpt_oss                 4 weekly
PP2xFSDP2      qwen3_5_moe             4 weekly
PP2xTP2xEP2    muon_dots1              4 selective_ac

FSDP4          deep                    4 once_per_step weekly
DDP4           llama                   4 once_per_step
TP2xEP4        qwen3_moe               4 once_per_step full_ac weekly
EP2xFSDP2      dots1_balance_losses    4 once_per_step selective_ac
TP2xFSDP2      qwen3_tied              4 once_per_step weekly
PP2xTP2xEP2    deep                    4 once_per_step weekly

DDP4           muon_qwen3_moe          1 weekly
HSDP2xTP2xEP2  muon_qwen3_moe          1
EP2xFSDP2      muon_uneven             1
TP2xEP2        muon_few_experts        2
TP2xEP4        muon_dots1              1 weekly
TP2xFSDP2      muon_qwen3_tied         1 weekly
TP2xFSDP2      muon_deepseek_v3        1
TP2xFSDP2      muon_qwen3_5            1

CP4            qwen3_moe               1 long weekly
CP2xFSDP2      qwen3_moe               1 long weekly
CP2xTP2        qwen3_moe               1 long weekly
CP2xEP2        qwen3_moe               1 long weekly
CP2xTP2xEP4    qwen3_moe               1 long weekly
HSDP2xCP2      qwen3_moe               1 long weekly
CP2xTP2xEP4    qwen3_moe               2 selective_ac operators weekly
CP2xTP2        balance_losses          2 full_ac
CP4            dots1_balance_losses    1
CP2xTP2xEP4    deepseek_v3             2 selective_ac
CP2xTP2        qwen3_next              1 weekly
CP2xFSDP2      qwen3_next              2 selective_ac weekly
CP2xTP2        ministral               1
CP2xTP2        gpt_oss                 2 attention_kept weekly
CP2xFSDP2      gpt_oss                 1 weekly
CP2xTP2        olmo3                   1 full_ac
CP2xFSDP2      qwen3_5_moe             1 weekly
CP2xTP2        qwen3_5                 1 weekly
CP2xFSDP2      qwen3_tied              2 selective_ac
CP2xTP2        qwen3_bias              2
HSDP2xCP2      yarn                    2
CP2xEP2        uneven                  2
CP2xTP2        muon_qwen3_moe          4 once_per_step
"""


def parse_cases():
    for words in filter(None, map(str.split, CASES.splitlines())):
        marks = [pytest.mark.full] if "weekly" in words else []
        mesh, family, micro_batches, *options = (word for word in words if word != "weekly")
        steps = STEPS if "long" in options else FEW
        overrides = [OPTIONS.get(word, word) for word in options if word != "long"]
        yield pytest.param(
            mesh, family, int(micro_batches), overrides, steps, marks=marks, id="-".join(words)
        )


@pytest.mark.parametrize(
    ("mesh", "family", "micro_batches", "overrides", "steps"), [*parse_cases()]
)
def test_trains_like_one_process(compare, mesh, family, micro_batches, overrides, steps):
    compare(mesh, family, *overrides, micro_batches=micro_batches, steps=steps)


def test_the_default_balance_loss_trains_like_one_process(compare, reference, checked):
    one, without = reference("default_balance"), checked(Degrees(), *FAMILIES["default_balance"])
    assert without.job.moe.aux_loss_coeff is None, "it is completed when the run is assembled"
    compare("TP2xEP2 only", "default_balance")
    assert one.grad_norms != pytest.approx(
        reference("no_balance").grad_norms, rel=RELATIVE_TOLERANCE
    )


def test_muon_takes_a_few_matrices_at_a_time(compare, train_run, monkeypatch):
    # before the ranks are forked
    monkeypatch.setattr(titanlite.features.muon, "_ELEMENTS_AT_ONCE", 1000)
    compare("FSDP2", "muon_qwen3_moe", train_run=train_run)


def test_the_row_of_the_padding_is_trained_on_no_mesh(checked, run_warm, meshes):
    """`pad_token_id` is a frequent token, in the second half of the rows: its embedding starts and
    stays at 0.
    """
    for degrees in (Degrees(), meshes["TP2xFSDP2"]):
        job = checked(
            degrees, *FAMILIES["qwen3_bias"], "--model.overrides.tie_word_embeddings=false"
        )
        _, loader = build_data(job.job, 0, 1)
        tokens = torch.cat([batch.tokens.flatten() for batch in loader.micro_batches(0)])
        padding = int(tokens[tokens >= job.model_config.vocab_size // 2].mode().values)
        config = replace(job.model_config, pad_token_id=padding)
        job = replace(job, model_config=config)
        weight = run_warm(degrees.world_size, embedding_after_two_steps, job)[0]
        assert not weight[padding].any() and weight[padding - 1].any()


def embedding_after_two_steps(job):
    trainer = assemble(job)
    for step in range(2):
        take_step(trainer, step)
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
    assert several.float().mean() > 0.2
    assert any((batch.labels == -100).any() for batch in batches)


def test_fused_kernels_train_like_one_process(compare):
    """Machines that lack a GPU run the kernels in Triton's interpreter, which takes seconds per
    layer.
    """
    compare("TP2xEP2 only", "flat", "--moe.grouped_gemm=triton", steps=1)
