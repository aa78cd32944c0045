"""Loading Hugging Face folders on any mesh: every bit and every tensor arrives, and no unneeded
byte is read or held.
"""

import json
import os

import pytest
import torch
import torch.distributed as dist
from files import read_json, write_json
from processes import anonymous_bytes
from quantized_folder import write_fp8
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.functional.conftest import weekly
from tests.loading import EVERY_FAMILY, hf_checkpoint, save_random_model
from tests.saving import save_hf_model
from tests.unit.checkpoint.test_hf_model import split_experts
from titanlite.assemble import build_data, shard
from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims
from titanlite.materialize import Init, local_of, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import family_of

FAMILIES = EVERY_FAMILY | {
    "qwen3 untied": ["--model.name=qwen3", "--model.overrides.tie_word_embeddings=false"],
    # Shards of unequal size, and fewer experts than ranks.
    "uneven": ["--model.overrides.num_experts=6", "--model.overrides.hidden_size=66"],
    "few experts": ["--model.overrides.num_experts=2", "--model.overrides.top_k=1"],
}
# One process, and meshes that shard on each axis, for models with experts and for others.
FEW_MESHES = {True: ["1", "TP2xEP2 only"], False: ["1", "TP2"]}
EVERY_MESH = [
    "1",
    "TP2xFSDP2",
    "HSDP2xTP2xEP2",
    "HSDP2x2",
    "FSDP4",
    "EP4",
    "EP2xFSDP2",
    "TP2xEP2",
    "TP2xEP4",
    "DDP4",
]
EVERY_MESH += ["CP2xTP2xEP4", "PP2xTP2xEP2"]


def build(job, dtype=torch.float32):
    model = build_decoder(job.model_config, dtype)
    dims = ParallelDims.build(job.degrees, "cpu")
    shard(model, job.job, dims, "cpu")
    return model, dims.stage_group


def load(job, folder, dtype=torch.float32):
    model, group = build(job, dtype)
    source = hf_checkpoint(folder, job.model_config)
    return model, materialize(model, "cpu", [source], group=group)


def load_and_save(jobs, source, folder, dtype):
    """Load `source` and save it again for each job; return how many tensors were drawn."""
    drawn = {}
    for name, job in jobs.items():
        model, plan = load(job, source, dtype)
        save_hf_model(model, plan, None, folder / name, torch.bfloat16)
        drawn[name] = sum(
            isinstance(entry.source, Init) and entry.info.persistent for entry in plan.entries
        )
    return drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_identical_on_meshes(run_warm, checked, meshes, tmp_path, family):
    """transformers -> titanlite on the mesh -> step-N -> transformers, without a missing or
    unexpected key.
    """
    overrides = FAMILIES[family]
    source = tmp_path / "transformers"
    config = checked(Degrees(), *overrides).model_config
    theirs = save_random_model(config, source, torch.bfloat16, max_shard_size="50KB")
    expected = theirs.state_dict()
    # From 5.24 on transformers keeps the routers of some families in float32.
    kept = any(param.dtype == torch.float32 for param in theirs.parameters())
    dtype = torch.float32 if kept else torch.bfloat16
    one, *others = jobs = {
        name: checked(meshes[name], *overrides)
        for name in (EVERY_MESH if family == "qwen3_moe" else FEW_MESHES[config.num_experts > 0])
        if config.num_experts or meshes[name].ep == 1
    }

    # A checkpoint may lack only the expert biases, if its format has no key for them.
    has_place = family_of(config).expert_bias_key or not config.num_experts
    allowed = 0 if has_place else config.num_layers
    for names, world_size in (([one], 1), (others, jobs[others[0]].degrees.world_size)):
        chosen = {name: jobs[name] for name in names}
        for drawn in run_warm(world_size, load_and_save, chosen, source, tmp_path, dtype):
            assert drawn == dict.fromkeys(names, allowed), (
                "nothing is drawn that the checkpoint covers"
            )
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / one, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value} == {}
    ours = loaded.state_dict()
    assert ours.keys() == expected.keys()
    assert all(param.dtype == ours[key].dtype for key, param in theirs.named_parameters())
    assert [key for key in expected if not torch.equal(ours[key], expected[key])] == []
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert load_file(tmp_path / one / files[-1]).keys() == _stored_keys(source)
    for name in jobs:
        assert {path.name for path in (tmp_path / name).iterdir()} == {*files, "titanlite"}, name
        same = [
            (tmp_path / name / file).read_bytes() == (tmp_path / one / file).read_bytes()
            for file in files
        ]
        assert all(same), f"{name}: other files than on one process"


def _stored_keys(folder):
    return set(read_json(folder / "model.safetensors.index.json")["weight_map"])


# --- reading


@pytest.mark.parametrize("mesh", ["HSDP2xTP2xEP2", "PP2xHSDP2"])
def test_every_byte_is_read_once_in_the_job(run_ranks, checked, meshes, tmp_path, mesh):
    """If every rank holds all of a tensor, one rank reads it and broadcasts it, and the ranks share
    this work.
    """
    four_layers = "--model.overrides.num_layers=4"
    save_random_model(checked(Degrees(), four_layers).model_config, tmp_path / "hf", torch.bfloat16)
    size = (tmp_path / "hf/model.safetensors").stat().st_size
    job = checked(meshes[mesh], four_layers)

    def rank_main():
        count, preadv = [0], os.preadv

        def counting(*args):
            done = preadv(*args)
            count[0] += done
            return done

        os.preadv = counting
        load(job, tmp_path / "hf", torch.bfloat16)
        return count[0]

    counts = run_ranks(4, rank_main)
    header = len(json.dumps({})) + 8
    assert size - 64 * 1024 < sum(counts) <= size - header, "the data, without the header, once"
    assert max(counts) < 0.4 * size, "no rank reads for all"


# The models take about 150 MB in their dtypes, so a rank that holds the whole model, even once, is
# far above the bound.
WIDE = ["--model.overrides.hidden_size=512", "--model.overrides.moe_intermediate_size=1536"]
WIDE_TIED = [
    "--model.name=qwen3",
    "--model.overrides.hidden_size=2048",
    "--model.overrides.intermediate_size=6144",
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return tmp_path_factory.mktemp("wide")


@pytest.mark.parametrize(
    ("mesh", "overrides", "dtype"),
    [
        weekly("TP2xEP4", WIDE, torch.float32),
        ("EP2xFSDP2", WIDE, torch.float32),
        ("FSDP4", WIDE_TIED, torch.bfloat16),
    ],
    ids=["TP2xEP4", "cast", "tied"],
)
def test_no_rank_ever_holds_more_than_its_shards(
    run_ranks, checked, meshes, wide, mesh, overrides, dtype
):
    """The parent samples anonymous memory, which must stay within the shards and 32 MiB, far below
    the size of the model.
    """
    job, folder = (
        checked(meshes[mesh], *overrides),
        wide / ("experts" if overrides == WIDE else "tied"),
    )
    if not folder.exists():
        save_random_model(job.model_config, folder, torch.bfloat16)
    whole = (folder / "model.safetensors").stat().st_size // 2 * dtype.itemsize  # of bfloat16

    def rank_main():
        import threading

        sharded, _ = build(job, dtype)
        dist.barrier()
        peak, stop = [0], threading.Event()

        def watch():
            while not stop.is_set():
                peak[0] = max(peak[0], anonymous_bytes())
                stop.wait(0.002)

        before = anonymous_bytes()
        watcher = threading.Thread(target=watch)
        watcher.start()
        plan = materialize(sharded, "cpu", [hf_checkpoint(folder, job.model_config)])
        stop.set()
        watcher.join()
        shards = sum(local_of(entry.tensor).nbytes for entry in plan.entries)
        return peak[0] - before, shards

    for grown, shards in run_ranks(4, rank_main):
        assert whole > 2 * (shards + 32 * 2**20)
        assert grown <= shards + 32 * 2**20, (
            f"{grown / 2**20:.1f} MiB grown, {shards / 2**20:.1f} MiB of shards"
        )


# --- FP8


@pytest.mark.parametrize(
    ("mesh", "family"),
    [
        weekly("FSDP4", "qwen3_moe"),
        ("TP2xEP4", "deepseek_v3"),
        ("TP2xEP2", "qwen3_5_moe_text"),
    ],
)
def test_block_scaled_fp8_is_dequantized_on_the_way_in(
    run_ranks, checked, meshes, tmp_path, mesh, family
):
    """Widths of 66 and 40 let shards cut through blocks of 16 x 16."""
    overrides = ["--model.overrides.hidden_size=66", "--model.overrides.moe_intermediate_size=40"]
    job = checked(meshes[mesh], f"--model.name={family}", *overrides)
    save_random_model(job.model_config, tmp_path / "hf", torch.bfloat16)
    path = tmp_path / "hf/model.safetensors"
    save_file(split_experts(load_file(path)), path, {"format": "pt"})
    expected = write_fp8(tmp_path / "hf", (16, 16))

    def rank_main():
        model, plan = load(job, tmp_path / "hf")
        save_hf_model(model, plan, None, tmp_path / "out", torch.float32)

    run_ranks(4, rank_main)
    ours = load_file(tmp_path / "out/model.safetensors")
    assert ours.keys() == expected.keys()
    assert [key for key in ours if not torch.equal(ours[key], expected[key])] == []
    assert "quantization_config" not in read_json(tmp_path / "out/config.json")


# --- files that are saved with the weights


def test_settings_of_the_original_model_survive(run_ranks, checked, tmp_path):
    """The saved model keeps token ids, generation settings, keys that titanlite does not use, and
    the tokenizer's chat template.
    """
    job = checked(Degrees())
    save_random_model(job.model_config, tmp_path / "hf", torch.bfloat16)
    config = read_json(tmp_path / "hf/config.json") | {
        "bos_token_id": 7,
        "max_window_layers": 28,
    }
    write_json(tmp_path / "hf/config.json", config)
    (tmp_path / "hf/generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "do_sample": true}'
    )

    def rank_main():
        tokenizer, _ = build_data(job.job, 0, 1)
        tokenizer.chat_template = "{{ messages[0].content }}"
        model, plan = load(job, tmp_path / "hf")
        save_hf_model(
            model, plan, tokenizer, tmp_path / "out", torch.bfloat16, assets=tmp_path / "hf"
        )

    run_ranks(1, rank_main)
    saved = read_json(tmp_path / "out/config.json")
    assert (saved["bos_token_id"], saved["max_window_layers"], saved["dtype"]) == (
        7,
        28,
        "bfloat16",
    )
    assert read_json(tmp_path / "out/generation_config.json")["temperature"] == 0.6
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages[0].content }}"
    tokenizer_config = read_json(tmp_path / "out/tokenizer_config.json")
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast", (
        "transformers 4 knows this one"
    )
