"""Nothing of a model's folder is run, and there is one place that asks transformers for
anything.
"""

import ast
import os
import pty
import sys
from pathlib import Path

import pytest
from files import read_json, write_json
from tiny_transformers import TEXT_SIZES, save_tiny_processor

import titanlite
from titanlite.base.errors import DataError
from titanlite.base.hf_objects import build_from_config
from titanlite.data.tokenizer import load_tokenizer
from titanlite.features.images import load_processor
from titanlite.models.families.config_json import load_config_and_class

PACKAGE = Path(titanlite.__file__).parent
DOOR = "base/hf_objects.py"
# What makes objects of files, or of what files say.
INTO_TRANSFORMERS = {
    "from_pretrained",
    "from_config",
    "_from_config",
    "get_class_from_dynamic_module",
    "pipeline",
    "from_dict",
    "get_cached_module_file",
    "load_dataset_builder",
    "trust_remote_code",
    "for_model",
    "from_json_file",
}
# What titanlite itself wrote, or has the values of.
EXEMPT = {
    ("checkpoint/description.py", "for_model"),
    ("checkpoint/description.py", "from_dict"),
    ("models/families/config_json.py", "from_dict"),
}


def test_only_one_module_has_transformers_load_anything():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = {getattr(node, key, "") for key in ("attr", "arg", "id")}
            found |= {(name, called) for called in named & INTO_TRANSFORMERS}
    assert {name for name, called in found if (name, called) not in EXEMPT} == {DOOR}
    assert (DOOR, "from_pretrained") in found, "the walk finds calls"


def add_code(folder, file, table):
    """What the file says, and code beside it that leaves `ran` where it runs."""
    path = folder / file
    known = read_json(path) if path.exists() else {}
    write_json(path, known | table)
    (folder / "mine.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nfrom transformers import PreTrainedConfig, "
        "CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast\nclass "
        "Config(PreTrainedConfig): model_type = 'mine'\nclass Images(CLIPImageProcessor): "
        "pass\nclass All(LlavaProcessor): pass\nclass Tokens(PreTrainedTokenizerFast): pass\n"
    )


def by_config_alone(folder):
    """Transformers finds the processor's class by config.json, and forgets on this way that no code
    may run.
    """
    (folder / "processor_config.json").unlink()
    tokenizer = read_json(folder / "tokenizer_config.json")
    tokenizer.pop("processor_class")
    write_json(folder / "tokenizer_config.json", tokenizer)
    write_json(folder / "config.json", {"model_type": "llava"})
    images = {"image_processor_type": "Images", "auto_map": {"AutoImageProcessor": "mine.Images"}}
    add_code(folder, "preprocessor_config.json", images)


ATTACKS = {
    "processor": lambda folder: add_code(
        folder,
        "processor_config.json",
        {"processor_class": "All", "auto_map": {"AutoProcessor": "mine.All"}},
    ),
    "image processor": by_config_alone,
    "tokenizer": lambda folder: add_code(
        folder,
        "tokenizer_config.json",
        {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": [None, "mine.Tokens"]}},
    ),
    "configuration": lambda folder: (
        add_code(
            folder, "config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
        ),
        add_code(
            folder, "tokenizer_config.json", {"tokenizer_class": None, "processor_class": None}
        ),
        (folder / "processor_config.json").unlink(),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("load", [load_processor, load_tokenizer])
def test_code_of_a_folder_is_not_run_whatever_the_terminal_answers(
    tmp_path, monkeypatch, attack, load
):
    save_tiny_processor(tmp_path)
    ATTACKS[attack](tmp_path)
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"y\n" * 20)
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        try:
            load(str(tmp_path))
        except DataError as error:
            assert "code" in str(error) or "image_processor" in str(error)
        assert sys.stdin is stdin
        monkeypatch.undo()
    os.close(keyboard)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("key", "nested"),
    [
        ("_attn_implementation", False),
        ("attn_implementation", True),
        ("_experts_implementation", False),
    ],
)
def test_a_config_does_not_choose_kernels_of_the_hub(key, nested):
    """Transformers would download the repository and import it."""
    hf = TEXT_SIZES | {"head_dim": 8}
    if nested:
        hf = {"model_type": "gemma3", "text_config": hf | {key: "evil/kernel"}}
    else:
        hf |= {"model_type": "olmo2", key: "evil/kernel"}
    import torch

    config, cls = load_config_and_class(hf, "config.json")
    with torch.device("meta"):
        model = build_from_config(cls, config, torch.float32)
    assert "evil" not in str(config) and model.config._attn_implementation in ("sdpa", "eager")


def test_special_files_are_refused_before_they_are_opened(tmp_path):
    save_tiny_processor(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    os.mkfifo(tmp_path / "chat_template.jinja")
    for load in (load_tokenizer, load_processor):
        with pytest.raises(DataError, match=r"it is not a regular file: .*chat_template\.jinja"):
            load(str(tmp_path))
