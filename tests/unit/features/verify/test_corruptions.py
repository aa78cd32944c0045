"""Each way to break a folder of weights is named, and whole folders are sound."""

import json
import re
import shutil

import pytest
import torch
from files import read_json, write_json
from safetensors.torch import load_file, save_file
from tiny_transformers import TEXT_MODELS, TEXT_SIZES
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.loading import stored
from titanlite.checkpoint.folder import CERTIFICATE_FILE
from titanlite.features.tools.verify import main
from titanlite.features.verify import digest_base, verify_folder
from titanlite.features.verify.certificate import render

# q and k have one shape.
SIZES = TEXT_SIZES | {"num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 16}
CONFIGS = {
    "moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "tied": TEXT_MODELS["qwen3"](dtype="bfloat16"),
    "biased": TEXT_MODELS["deepseek_v3"](),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
PARTS = ("gate", "up", "down")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@torch.no_grad()
def train(model):
    """Move every parameter by about a hundredth, as training does."""
    for param in model.parameters():
        param += torch.randn_like(param) * 0.01 * max(float(param.std()), 0.1)
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of a base and of what was trained from it, by family."""
    root = tmp_path_factory.mktemp("folders")
    for family, config in CONFIGS.items():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config)
        if family == "biased":
            model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.randn(4) / 10)
        model.save_pretrained(root / family / "base")
        train(model).save_pretrained(root / family / "trained", max_shard_size="20KB")
    return root


def certify(folder, base, states=()):
    """Write the certificate that a run would have written."""
    states = dict(states)
    rows = {
        key: {"state": states.get(key, "trained"), "source": "base", "digest": digest}
        for key, digest in digest_base(folder).items()
    }
    (folder / CERTIFICATE_FILE).parent.mkdir()
    (folder / CERTIFICATE_FILE).write_bytes(render({"tensors": rows, "base": digest_base(base)}))


def rewrite(folder, change):
    """Load all tensors of `folder`, change them, and save them in one file."""
    tensors = stored(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE, {"format": "pt"})


def in_tensors(change):
    return lambda folder: rewrite(folder, change)


def layers_exchanged(tensors):
    for key in [key for key in tensors if ".layers.0." in key]:
        other = key.replace(".layers.0.", ".layers.1.")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def experts_twice(tensors):
    for layer in range(2):
        for part in PARTS:
            for expert in (2, 3):
                key = EXPERT.format(layer, expert, part)
                tensors[key] = tensors[EXPERT.format(layer, expert - 2, part)].clone()


def experts_untouched(folder):
    base = load_file(folder.parent / "base" / SINGLE)
    rewrite(folder, lambda tensors: tensors.update({k: base[k] for k in base if ".experts." in k}))


def in_config(**changes):
    def change(folder):
        path = folder / "config.json"
        write_json(path, read_json(path) | changes)

    return change


def untied(folder):
    """The head is stored for itself, equal to the embedding, and nothing says that both are one."""
    in_config(tie_word_embeddings=False)(folder)
    key = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[key].clone()}))


def torn(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.5


def one(key, change):
    return in_tensors(lambda tensors: tensors.update({key: change(tensors[key])}))


def no_number(values):
    values = values.clone()
    values.view(-1)[7] = torch.nan
    return values


def remove_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def truncate(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def stale_index(folder):
    index = read_json(folder / INDEX)
    files = index["weight_map"]
    key, right = next(iter(files.items()))
    files[key] = next(name for name in files.values() if name != right)
    write_json(folder / INDEX, index)


Q, K = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")
GATE = EXPERT.format(0, 1, "gate")
BASE, CERTIFIED, ALONE = "base", "certificate", "alone"
# name: (family, how it is verified, what breaks it, what must be said)
CORRUPTIONS = {
    "one rank's experts twice": (
        "moe",
        ALONE,
        in_tensors(experts_twice),
        r"experts\.2\.gate_proj\.weight \(model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight\)",
    ),
    "experts untouched by training": (
        "moe",
        BASE,
        experts_untouched,
        r"experts\.0\..* and 21 more: is as in the base, and so is all of its group",
    ),
    "one layer swapped with another": (
        "moe",
        BASE,
        in_tensors(layers_exchanged),
        r"layers\.0\..*: has nothing in common with the base's: exchanged",
    ),
    "head untied": (
        "tied",
        ALONE,
        untied,
        r"model\.embed_tokens\.weight \(lm_head\.weight\): has the same bits as the tensor in",
    ),
    "tie broken": (
        "tied",
        ALONE,
        in_tensors(torn),
        r"lm_head\.weight: .* has it with different values than model\.embed_tokens\.weight",
    ),
    "a bias rounded to bf16": (
        "biased",
        ALONE,
        one(BIAS, lambda bias: bias.bfloat16().float()),
        rf"{re.escape(BIAS)}: a selection bias was rounded to 16 bits",
    ),
    "a missing shard": ("moe", ALONE, remove_shard, r"model-00002-of-\d+.* there is no such file"),
    "an extra key": (
        "moe",
        ALONE,
        in_tensors(lambda t: t.update({"model.ghost.weight": torch.ones(2, 2)})),
        r"model\.ghost\.weight: unexpected",
    ),
    "a truncated file": ("moe", ALONE, truncate, r"model-00002-of-\d+.* is cut off, damaged"),
    "a tensor of zeros": (
        "moe",
        ALONE,
        one(GATE, torch.zeros_like),
        rf"{re.escape(GATE)}: all its elements are equal",
    ),
    "a NaN": ("moe", ALONE, one(Q, no_number), rf"{re.escape(Q)}: has NaN or infinite"),
    "q and k exchanged": (
        "moe",
        BASE,
        in_tensors(lambda t: t.update({Q: t[K], K: t[Q]})),
        rf"{re.escape(K)}, {re.escape(Q)}: has nothing in common|{re.escape(Q)}.*nothing in common",
    ),
    "wrong dtype": (
        "moe",
        ALONE,
        one(Q, torch.Tensor.half),
        rf"{re.escape(Q)}: is not in float32, the dtype in config.json",
    ),
    "stale index": ("moe", ALONE, stale_index, r"index\.json is stale"),
    "config with other sizes": (
        "moe",
        ALONE,
        in_config(hidden_size=40),
        r"model\.embed_tokens\.weight: .*\(128, 32\), the model expects\s+\(128, 40\)",
    ),
    "a carried tensor changed": (
        "moe",
        CERTIFIED,
        one("lm_head.weight", lambda values: values + 1),
        r"lm_head\.weight \(carried, has other bits\): is not what was saved",
    ),
}


def verify(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def copied(folders, family, tmp_path, how):
    shutil.copytree(folders / family, tmp_path / family)
    folder, base = tmp_path / family / "trained", tmp_path / family / "base"
    if how == CERTIFIED:
        kept = {k: v for k, v in load_file(base / SINGLE).items() if k == "lm_head.weight"}
        rewrite(folder, lambda tensors: tensors.update(kept))
        certify(folder, base, {"lm_head.weight": "carried"})
    return folder, ["--base", base] if how == BASE else []


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_is_named(name, folders, tmp_path, capsys):
    family, how, corrupt, text = CORRUPTIONS[name]
    folder, more = copied(folders, family, tmp_path, how)
    corrupt(folder)
    code, shown = verify(capsys, folder, *more)
    assert code == 1 and "FAILED" in shown.splitlines()[0]
    assert re.search(text, shown), shown
    assert len(shown.splitlines()) < 40


@pytest.mark.parametrize("how", [ALONE, BASE, CERTIFIED])
@pytest.mark.parametrize("family", CONFIGS)
def test_whole_folders_are_sound(family, how, folders, tmp_path, capsys):
    folder, more = copied(folders, family, tmp_path, how)
    code, shown = verify(capsys, folder, *more)
    assert code == 0 and "sound" in shown.splitlines()[0], shown
    code, text = verify(capsys, folder, *more, "--json")
    report = json.loads(text)
    assert code == 0 and not report["problems"] and report["table"][0][0] == "group"
    if how != ALONE:
        assert re.search(r"attention +\d+ +\w+ +(\d+) of \1", shown)


def test_a_tied_head_that_is_stored_too_is_sound(folders, tmp_path, capsys):
    folder, _ = copied(folders, "tied", tmp_path, ALONE)
    embedding = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    code, shown = verify(capsys, folder)
    assert code == 0, shown


def test_codes_in_fp8_are_compared_by_their_bits(tmp_path):
    codes = torch.randn(2, 16, 16).to(torch.float8_e4m3fn)
    for name, values in (("base", codes), ("same", codes), ("zero", torch.zeros_like(codes))):
        (tmp_path / name).mkdir()
        save_file({"experts.codes": values}, tmp_path / name / SINGLE)
    same, zero = (verify_folder(tmp_path / name, tmp_path / "base") for name in ("same", "zero"))
    assert same.table[1][:4] == ("experts", "2", "float8_e4m3fn", "0 of 2")
    assert zero.table[1][3] == "2 of 2" and "all its elements are equal" in zero.problems[0]


def test_a_base_of_another_revision_is_named(folders, tmp_path, capsys):
    folder, _ = copied(folders, "moe", tmp_path, CERTIFIED)
    other = tmp_path / "other"
    train(AutoModelForCausalLM.from_pretrained(folder.parent / "base")).save_pretrained(other)
    code, shown = verify(capsys, folder, "--base", other)
    assert code == 1 and f"{other} is not the base that the run began with" in shown
    assert verify(capsys, folder, "--base", folder.parent / "base")[0] == 0


def test_what_was_frozen_can_be_said(folders, tmp_path, capsys):
    folder, more = copied(folders, "moe", tmp_path, BASE)
    experts_untouched(folder)
    code, shown = verify(capsys, folder, *more, "--frozen", "*.experts.*")
    assert code == 0, shown
    assert re.search(r"experts +24 +float32 +0 of 24", shown)
    rewrite(folder, lambda tensors: tensors.update({GATE: tensors[GATE] * 1.01}))
    code, shown = verify(capsys, folder, *more, "--frozen", "*.experts.*")
    assert code == 1 and f"{GATE}: was not trained, and differs from the base" in shown


def fused(tensors):
    """Store all experts of a layer in one tensor, as many models have them."""
    for layer in range(2):
        gate, up, down = (
            torch.stack([tensors.pop(EXPERT.format(layer, i, part)) for i in range(4)])
            for part in PARTS
        )
        stem = f"model.layers.{layer}.mlp.experts"
        tensors[f"{stem}.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{stem}.down_proj"] = down


def test_experts_in_one_tensor_are_compared_one_by_one(folders, tmp_path):
    folder, base = copied(folders, "moe", tmp_path, ALONE)[0], tmp_path / "moe/base"
    for each in (folder, base):
        rewrite(each, fused)
    certify(folder, base)
    down = "model.layers.1.mlp.experts.down_proj"
    before = load_file(base / SINGLE)[down]

    def problems_after(change):
        shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True)
        rewrite(tmp_path / "changed", lambda tensors: change(tensors[down]))
        found = []
        for arguments in ((), (base,)):
            report = verify_folder(tmp_path / "changed", *arguments)
            found.append((" ".join(report.problems), dict(row[0::3] for row in report.table)))
        return found

    for problems, moved in problems_after(lambda values: None):
        assert not problems and moved["experts"] == "16 of 16"
    (alone, _), (compared, moved) = problems_after(lambda values: values[2].copy_(values[0]))
    assert f"{down}[2] ({down}[0]): has the same" in alone and f"{down}[2] ({down}[0])" in compared
    assert f"{down} (trained, has other bits): is not what was saved" in alone
    assert f"{down}[2]: has nothing in common" in compared
    _, (_, moved) = problems_after(lambda values: values[3].copy_(before[3]))
    assert moved["experts"] == "15 of 16"
