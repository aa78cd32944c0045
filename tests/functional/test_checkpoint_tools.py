"""`python -m titanlite inspect` and `export`: they list every tensor, find damage, and make copies
that equal the source.
"""

import os
import re
import shutil
from functools import cache, partial

import pytest
import torch
from files import read_json, write_json
from quantized_folder import write_fp8
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.functional.conftest import train_to_the_end
from tests.loading import save_random_model, stored
from titanlite.checkpoint import writer
from titanlite.config.parallelism import Degrees
from titanlite.features.tools import export as export_checkpoint
from titanlite.features.tools import models as inspect_checkpoint

MODEL, SIDECAR, MASTERS = (
    "model.safetensors",
    "titanlite/expert_bias.safetensors",
    "titanlite/weights.safetensors",
)
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
BESIDE = {
    "chat_template.jinja": "{{ 1 }}",
    "tokenizer.json": "{}",
    "LICENSE": "x",
    "generation_config.json": "{}",
    # transformers' place for more than one
    "additional_chat_templates/tool_use.jinja": "{{ 2 }}",
}
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "optimizer.pt")


def table(done, first):
    """The printed table whose first column is called `first`, row by row."""
    lines = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == first and len(cells) > 1)
    end = next(
        (i for i in range(start, len(lines)) if len(lines[i]) != len(lines[start])), len(lines)
    )
    return [dict(zip(lines[start], cells, strict=True)) for cells in lines[start + 1 : end]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Print sizes to the byte, and copy pieces of 4000 bytes, which cut tensors anywhere."""
    monkeypatch.setattr(inspect_checkpoint, "format_size", lambda nbytes: f"{nbytes} B")
    monkeypatch.setattr(writer, "JOB_BYTES", 4000)
    # The logger would keep this test's standard output.
    monkeypatch.setattr(export_checkpoint, "setup_logger", lambda: None)


@pytest.fixture(scope="module")
def step(run_ranks, configure, tmp_path_factory):
    """A checkpoint after 2 steps of 2 ranks: bfloat16, float32 masters, and biases for which
    Qwen3-MoE has no key.
    """
    folder = tmp_path_factory.mktemp("run")
    settings = [
        f"--job.dump_folder={folder}",
        "--training.steps=2",
        "--lr_scheduler.warmup_steps=1",
        "--training.seed=1",
        "--checkpoint.export_dtype=bfloat16",
    ]
    run_ranks(2, train_to_the_end, configure(Degrees(dp_shard=2), *settings))
    return folder / "checkpoint/step-2"


@pytest.fixture(scope="module")
def hf_model(configure, tmp_path_factory):
    """`hf_model(*overrides)` -> folder of a float32 model of random tensors, saved by transformers,
    made once.
    """

    @cache
    def save(*overrides, max_shard_size="1GB"):
        config = configure(Degrees(), *overrides).model_config
        folder = tmp_path_factory.mktemp("hf")
        save_random_model(config, folder, max_shard_size=max_shard_size)
        (folder / "additional_chat_templates").mkdir()
        for name, text in (BESIDE | dict.fromkeys(OTHER_WEIGHTS, "{}")).items():
            (folder / name).write_text(text)
        return folder

    return save


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def edit_config(folder, **changes):
    config = read_json(folder / "config.json") | changes
    write_json(folder / "config.json", config)


def test_parameters_are_counted_as_transformers_does(command, hf_model, tmp_path):
    """A tied head counts once, and the scales of FP8 (here a quarter more numbers) do not count:
    2.0 M. The folder has no manifest.
    """
    wide = hf_model("--model.name=qwen3", "--model.overrides.intermediate_size=5000")
    folder = shutil.copytree(wide, tmp_path / "hf")
    count = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    write_fp8(folder, (2, 2))
    done = command("inspect", folder)
    assert f"qwen3, {count / 1e6:.1f} M parameters, BF16, F8_E4M3, " in done.stdout
    assert (
        done.returncode == 0
        and "  manifest   none; " in done.stdout
        and "training" not in done.stdout
    )


@pytest.mark.parametrize("saved_by", ["titanlite", "transformers"])
def test_rows_cover_every_tensor(command, step, hf_model, saved_by):
    """Model, masters, optimizer and biases: one row per tensor with --all, none without."""
    folder = step if saved_by == "titanlite" else hf_model(max_shard_size="100KB")
    files = list(folder.rglob("*.safetensors"))
    expected = {
        key: (
            DTYPES[tensor.dtype],
            str(tuple(tensor.shape)),
            f"{tensor.nbytes} B",
            str(file.relative_to(folder)),
        )
        for file in files
        for key, tensor in load_file(file).items()
    }
    every = table(command("inspect", folder, "--all"), "tensor")
    assert {r["tensor"]: (r["dtype"], r["shape"], r["size"], r["file"]) for r in every} == expected
    assert len(every) == len(expected) and "down_proj" not in command("inspect", folder).stdout


def test_a_flipped_bit_is_found_by_checksums(command, step, tmp_path):
    copy = shutil.copytree(step, tmp_path / "copy")
    data = (copy / SIDECAR).read_bytes()
    (copy / SIDECAR).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert command("inspect", copy).returncode == 0
    done = command("inspect", copy, "--checksums")
    named = [
        line.split(":")[0].strip()
        for line in done.stdout.splitlines()
        if "checksum differs" in line
    ]
    assert (done.returncode, named) == (1, [SIDECAR])


def assert_same(ours, expected):
    assert {key: tensor.dtype for key, tensor in ours.items()} == {
        key: t.dtype for key, t in expected.items()
    }
    assert [key for key in ours if not torch.equal(ours[key], expected[key])] == []


def load_strictly(folder):
    """Load with transformers in the dtype of its config.json; missing and unexpected tensors are
    errors.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value} == {}
    return model.state_dict()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", torch.float32),
        ("deepseek_v3", torch.bfloat16),
        ("qwen3", torch.float16),
        ("gpt_oss", torch.bfloat16),
    ],
    ids=lambda value: NAMES.get(value, value),
)
def test_an_export_is_the_source_cast(command, hf_model, tmp_path, monkeypatch, family, dtype):
    """Buffers keep their dtype. The source has several files, and so has the float16 copy.
    Everything is copied but other weights.
    """
    split = dtype == torch.float16
    monkeypatch.setattr(writer, "FILE_BYTES", 60_000 if split else 1 << 32)
    folder, out = hf_model(f"--model.name={family}", max_shard_size="100KB"), tmp_path / "new/out"
    done = command("export", folder, out, "--dtype", NAMES[dtype])
    assert (done.returncode, done.stderr) == (0, "") and str(out) in done.stdout
    before = stored(folder)
    cast = {
        key: tensor if "correction_bias" in key else tensor.to(dtype)
        for key, tensor in before.items()
    }
    assert_same(stored(out), cast)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    # Since 5.24 transformers keeps the routers of some families in float32, with bits that the copy
    # does not have.
    is_kept = {
        key: "correction_bias" in key or tensor.dtype == dtype for key, tensor in theirs.items()
    }
    assert_same(
        load_strictly(out),
        {k: t if is_kept[k] else t.to(dtype).to(t.dtype) for k, t in theirs.items()},
    )
    beside = {
        name: data.decode() for name, data in contents(out).items() if not name.startswith("model")
    }
    assert beside == BESIDE | {"config.json": beside["config.json"]}
    assert (out / f"{MODEL}.index.json").exists() == split == (not (out / MODEL).exists())
    config = read_json(folder / "config.json")
    exported = read_json(out / "config.json")
    older = {"rope_theta", "rope_scaling", "partial_rotary_factor", "num_experts"}
    assert {
        key: value for key, value in exported.items() if key in config or key not in older
    } == config | {"dtype": NAMES[dtype]}
    assert [path.name for path in out.parent.iterdir()] == ["out"], "nothing temporary is left"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=NAMES.get)
def test_an_export_of_a_run_has_its_weights_and_no_state(command, step, tmp_path, dtype):
    """Each dtype is one rounding of the float32 masters; of the run's state only the biases are
    copied.
    """
    out = tmp_path / "out"
    assert command("export", step, out, "--dtype", NAMES[dtype]).returncode == 0
    ours = load_file(out / MODEL)
    for key, master in load_file(step / MASTERS).items():
        name = key.removeprefix("master.")
        part = "(gate|up)" if name.endswith("gate_up_proj") else "down"
        pattern = re.sub(
            r"experts\.(gate_up|down)_proj$", rf"experts.\\d+.{part}_proj.weight", name
        )
        got = [tensor for k, tensor in ours.items() if re.fullmatch(pattern, k)]
        assert torch.equal(torch.cat(got).view_as(master), master.to(dtype)), name
    assert not torch.equal(master, master.bfloat16().float()), "the run's own copy has fewer bits"
    assert_same(load_file(out / SIDECAR), load_file(step / SIDECAR))
    assert [tensor.any().item() for tensor in load_file(out / SIDECAR).values()] == [True, True]
    before, after = contents(step), contents(out)
    assert after.keys() == {name for name in before if not name.startswith("titanlite/")} | {
        SIDECAR
    }
    assert [
        name for name in after if name.startswith(("token", "gen")) and after[name] != before[name]
    ] == []
    assert len(AutoTokenizer.from_pretrained(out)) == 310 and load_strictly(out)


def test_a_refused_export_leaves_everything_as_it_was(command, hf_model, tmp_path, monkeypatch):
    model, out = hf_model(), tmp_path / "out"

    def refused(source, *words, to=out, lines=1):
        before = sorted(tmp_path.rglob("*"))
        done = command("export", source, to)
        assert done.returncode == 2 and done.stderr.startswith("titanlite: error: ")
        assert done.stderr.count("\n") == lines, "a traceback would have more"
        assert [word for word in words if word not in done.stderr] == []
        assert sorted(tmp_path.rglob("*")) == before

    for make, remove in (
        (out.mkdir, out.rmdir),
        (out.touch, out.unlink),
        (partial(out.symlink_to, "no"), out.unlink),
    ):
        make()
        refused(model, str(out))
        remove()
    (tmp_path / "file").touch()
    refused(model, "Not a directory", to=tmp_path / "file/out")
    refused(model, "xxx", to=tmp_path / ("x" * 300))
    for name, (damage, word, lines) in DAMAGES.items():
        source = shutil.copytree(model, tmp_path / name)
        damage(source)
        refused(source, word, lines=lines)
    # fails when files are there
    monkeypatch.setattr(writer, "bytes_of", lambda flat: os.pread(-1, 1, 0))
    refused(model, "Bad file descriptor")


DAMAGES = {
    "removed": (shutil.rmtree, "is not a folder", 1),
    "cut off": (
        lambda folder: os.truncate(folder / MODEL, (folder / MODEL).stat().st_size - 1),
        "cut off",
        1,
    ),
    "deeper": (
        lambda folder: edit_config(folder, num_hidden_layers=3),
        "layers.2.mlp.gate.weight: missing",
        12,
    ),
    "with a text for a token": (
        lambda folder: edit_config(folder, eos_token_id="</s>"),
        "eos_token_id",
        1,
    ),
}
