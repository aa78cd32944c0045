"""A checkpoint is a Hugging Face folder: what any mesh saves, transformers loads, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.loading import EVERY_FAMILY
from tests.saving import save_hf_model
from titanlite import assemble
from titanlite.assemble import build_data
from titanlite.checkpoint import writer
from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims
from titanlite.materialize import Init, Normal, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import family_of

SEED = 7
# Ones and zeros would hide a mix-up of norms or biases.
DISTINCT = {
    "*norm.weight": Init(Normal(mean=1.0, std=0.1)),
    "*.expert_bias": Init(Normal(std=0.01), dtype=torch.float32),
}
DENSE_DISTINCT = {"*norm.weight": DISTINCT["*norm.weight"]}

QWEN3_BIAS = ["--model.name=qwen3", "--model.overrides.attention_bias=true"]
QWEN3_MOE: list[str] = []
UNEVEN_MOE = ["--model.overrides.num_experts=6", "--model.overrides.hidden_size=66"]
FEW_EXPERTS = ["--model.overrides.num_experts=2", "--model.overrides.top_k=1"]
DOTS1 = ["--model.name=dots1"]


def build(checked, *, shard):
    model = build_decoder(checked.model_config)
    if shard:
        assemble.shard(model, checked.job, ParallelDims.build(checked.degrees, "cpu"), "cpu")
    sources = dict(DISTINCT if model.moe_layers() else DENSE_DISTINCT)
    if checked.model_config.attention_bias:
        sources["*_proj.bias"] = Init(Normal(std=0.02))
    return model, materialize(model, "cpu", [sources], seed=SEED)


@pytest.fixture
def save(run_ranks, tmp_path):
    """`save(checked, dtype)`: build on the mesh of `checked`, save, and return the folder."""

    def run(checked, dtype=torch.float32, name="saved"):
        folder = tmp_path / name / "step-1"

        def rank_main():
            tokenizer, _ = build_data(checked.job, 0, 1)
            model, plan = build(checked, shard=True)
            save_hf_model(model, plan, tokenizer, folder, dtype)

        run_ranks(checked.degrees.world_size, rank_main)
        assert [path.name for path in folder.parent.iterdir()] == ["step-1"], (
            "nothing temporary is left"
        )
        return folder

    return run


def load(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value} == {}, (
        "missing, unexpected or mismatched keys"
    )
    return model


def hf_name(name):
    return name.replace(".gate.expert_bias", ".gate.e_score_correction_bias")


def assert_same_tensors(hf, plan, dtype=torch.float32):
    """Every tensor of transformers' model is ours, and all of ours are there."""
    theirs = {**dict(hf.named_parameters(remove_duplicate=False)), **dict(hf.named_buffers())}
    theirs = {
        name: tensor.detach() for name, tensor in theirs.items() if not name.endswith("inv_freq")
    }
    names = set()
    for entry in plan.entries:
        for name in map(hf_name, entry.names):
            if not entry.info.persistent or (
                name.endswith("correction_bias") and name not in theirs
            ):
                continue
            names.add(name)
            expected = entry.tensor.detach()
            expected = expected.to(dtype) if entry.info.kind == "parameter" else expected
            assert theirs[name].dtype == expected.dtype, name
            assert torch.equal(theirs[name], expected), name
    assert names == theirs.keys()


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        (QWEN3_BIAS, "TP2xFSDP2"),
        (QWEN3_MOE, "CP2xTP2xEP4"),
        (QWEN3_MOE, "PP2xTP2xEP2"),
        (UNEVEN_MOE, "PP2xEP2"),
        (UNEVEN_MOE, "EP2xFSDP2"),
        (FEW_EXPERTS, "FSDP4"),
        (DOTS1, "HSDP2x2"),
    ],
)
def test_transformers_loads_what_a_mesh_saved_bit_for_bit(checked, meshes, save, family, mesh):
    job = checked(meshes[mesh], *family)
    hf = load(save(job))
    assert_same_tensors(hf, build(job, shard=False)[1])


@pytest.mark.parametrize("family", EVERY_FAMILY.values(), ids=EVERY_FAMILY)
def test_files_are_those_that_transformers_writes_and_its_logits_those_of_titanlite(
    checked, save, tmp_path, family
):
    """Same keys, same bits: experts one by one, a tied head not at all."""
    job = checked(Degrees(), *family)
    folder = save(job)
    hf, (model, _) = load(folder), build(job, shard=False)
    hf.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "theirs/model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert ("lm_head.weight" in ours) == (not job.model_config.tie_word_embeddings)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert (folder / name).is_file()
    for moe in model.moe_layers().values():
        if not family_of(job.model_config).expert_bias_key:
            moe.gate.expert_bias.zero_()  # transformers has no such buffer
    tokens = torch.randint(
        0, job.model_config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        logits, expected = model.eval()(tokens), hf.eval()(tokens).logits
    # Float32 sums in another order, through 3 layers: 1e-5 of the largest logit.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert expected.std() > 0.05


def test_bfloat16_export_casts_parameters_once_and_keeps_buffers(checked, meshes, save):
    job = checked(meshes["TP2xEP2"], *DOTS1)
    folder = save(job, torch.bfloat16)
    _, plan = build(job, shard=False)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(folder / "model.safetensors")
    expected = {
        "model.norm.weight": torch.bfloat16,
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.float32,
    }
    assert {key: stored[key].dtype for key in expected} == expected
    for entry in plan.entries:
        if entry.fqn in stored:
            assert torch.equal(stored[entry.fqn], entry.tensor.detach().to(torch.bfloat16)), (
                entry.fqn
            )
    load(folder, torch.bfloat16)


def test_large_model_is_split_into_files_with_an_index(checked, meshes, save, monkeypatch):
    limit = 60_000
    monkeypatch.setattr(writer, "FILE_BYTES", limit)  # before the ranks are forked
    job = checked(meshes["TP2xEP4"])
    folder = save(job)
    files = sorted(path.name for path in folder.glob("model*.safetensors"))
    assert len(files) > 5
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for name in files:
        tensors = load_file(folder / name)
        found.update(dict.fromkeys(tensors, name))
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
        total += size
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total
    assert_same_tensors(load(folder), build(job, shard=False)[1])


def test_expert_bias_without_a_key_is_kept_in_a_file_beside(checked, meshes, save):
    job = checked(meshes["TP2xEP2"])
    sidecar = load_file(save(job) / "titanlite/expert_bias.safetensors")
    _, plan = build(job, shard=False)
    expected = {e.fqn: e.tensor.detach() for e in plan.entries if e.fqn.endswith("expert_bias")}
    assert sidecar.keys() == expected.keys() and len(expected) == 2
    for key, tensor in expected.items():
        assert sidecar[key].dtype == torch.float32 and tensor.abs().max() > 0
        assert torch.equal(sidecar[key], tensor)
