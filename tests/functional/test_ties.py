"""Ties of heads and embeddings, as `from_pretrained` reads them from config.json and the stored
tensors.
"""

import itertools
import logging
import shutil

import pytest
import sweep_transformers
import torch
import transformers
from files import read_json, write_json
from safetensors.torch import load_file, save_file

from tests.functional.conftest import NO_PRESET, train_to_the_end
from titanlite.assemble import build_model
from titanlite.base.log import logger
from titanlite.checkpoint.hf_model import weights_of
from titanlite.checkpoint.ties import untie
from titanlite.config import TransformersConfig
from titanlite.config.model import ModelSection
from titanlite.config.parallelism import Degrees
from titanlite.materialize import materialize
from titanlite.models.families import resolve_model_config

# The models in which the top-level flag wins, either flag wins, or the class's default is True, and
# models without text_config.
TYPES = ("qwen2_5_vl", "gemma3", "mistral3", "qwen3_vl_moe", "kimi_k25", "qwen3", "gemma3_text")
# Composite, as the first, and a text model like qwen3.
WEEKLY = ("gemma3", "mistral3", "qwen3_vl_moe", "kimi_k25", "gemma3_text")
FLAGS = (True, False, None)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    with sweep_transformers.quiet():
        return sweep_transformers.save_cases(TYPES, tmp_path_factory.mktemp("cases"))


def write(case, folder, top, text, stored):
    """Write the case with other flags, and with a head that is missing, equals the embedding, or
    differs from it.
    """
    folder.mkdir()
    table = read_json(case.saved / "config.json")
    for section, flag in ((table, top), (table.get("text_config", {}), text)):
        section.pop("tie_word_embeddings", None)
        section |= {} if flag is None else {"tie_word_embeddings": flag}
    write_json(folder / "config.json", table)
    tensors = load_file(case.saved / "model.safetensors")
    (embedding,) = (key for key in tensors if key.endswith("embed_tokens.weight"))
    head = (
        embedding.replace("model.embed_tokens.weight", "lm_head.weight")
        if "language_model.model" in embedding
        else ""
    )
    tensors.pop("lm_head.weight", None)
    if stored != "none":
        tensors[head or "lm_head.weight"] = tensors[embedding] + (stored == "other")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def outer(model):
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in WEEKLY)) for name in TYPES],
)
def test_ties_and_values_are_those_of_from_pretrained(cases, tmp_path, name):
    """The flags at the top and in text_config take all values. Only a missing head that is not tied
    is refused; transformers would draw it.
    """
    case, tied = cases[name], 0
    for top, text, stored in itertools.product(FLAGS, FLAGS, ("none", "equal", "other")):
        folder = write(case, tmp_path / f"{top}-{text}-{stored}", top, text, stored)
        with sweep_transformers.quiet():
            theirs, info = case.cls.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
            config = resolve_model_config(ModelSection(hf_assets_path=str(folder)))
            config = untie(config, folder, build_model)
            ours = build_model(config)
            sources = weights_of(folder, ours)
        where = f"{top}, {text}, {stored}"
        if info["missing_keys"]:
            with pytest.raises(Exception, match=r"lm_head\.weight: missing"):
                materialize(ours, "cpu", [sources])
            continue
        materialize(ours, "cpu", [sources])
        is_theirs = isinstance(config, TransformersConfig)
        mine = (
            outer(ours.transformers_model)
            if is_theirs
            else (ours.model.embed_tokens.weight, ours.lm_head.weight)
        )
        expected = outer(theirs)
        assert (mine[0] is mine[1]) == (expected[0] is expected[1]), where
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True)), (
            where
        )
        tied += mine[0] is mine[1]
    assert 0 < tied < 27


def warnings_of(job):
    """Train, and return the logged warnings."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    train_to_the_end(job)
    return said


@pytest.mark.slow
def test_a_run_keeps_a_head_of_its_own_and_says_so_in_what_it_saves(
    run_ranks,
    pretrained,
    checked,
    tmp_path,
):
    """A native model and one of transformers: begun, resumed, saved untied, and read by
    transformers.
    """
    untied = ["--model.name=qwen3", "--model.overrides.tie_word_embeddings=false"]
    base = tmp_path / "base"
    shutil.copytree(pretrained("untied", 0.1, *untied), base)
    reference = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    table = read_json(base / "config.json") | {"tie_word_embeddings": True}
    write_json(base / "config.json", table)
    settings = [
        *NO_PRESET,
        f"--model.path={base}",
        "--optimizer.lr=1e-6",
        "--moe.expert_bias_update_rate=none",
    ]
    for kind in ("auto", "transformers"):
        folder = tmp_path / kind
        for steps in (1, 2):
            job = checked(
                Degrees(dp_shard=2),
                *settings,
                f"--model.implementation={kind}",
                f"--training.steps={steps}",
                f"--job.dump_folder={folder}",
            )
            warnings = run_ranks(2, lambda job=job: warnings_of(job))
            text = "lm_head.weight with different values than the tensor that config.json ties it"
            assert [sum(text in warning for warning in of_rank) for of_rank in warnings] == [1, 0]
        saved = folder / "checkpoint/step-2"
        auto = transformers.AutoModelForCausalLM
        loaded, info = auto.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values()) and not loaded.config.tie_word_embeddings
        for one, other in zip(outer(loaded), outer(reference), strict=True):
            assert one is not other and torch.allclose(one, other, atol=1e-4)
        assert not torch.allclose(*outer(loaded), atol=1e-2)
