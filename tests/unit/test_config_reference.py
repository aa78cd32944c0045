"""The reference page follows the schema, and the schema is complete."""

import runpy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

from titanlite.config import JobConfig
from titanlite.config.schema import setting
from titanlite.config.settings import get_settings, get_source_section

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/config_reference.py"))
REFERENCE, main, render_reference = (SCRIPT[name] for name in ("REFERENCE", "main", "render_reference"))


def list_dataclasses(schema: type) -> list[type]:
    """`schema` and the dataclasses its fields default to."""
    inner = [type(getattr(schema(), item.name)) for item in fields(schema)]
    return [schema, *(found for kind in inner if is_dataclass(kind) for found in list_dataclasses(kind))]


def list_unannotated(schema: type) -> list[str]:
    """Attributes that the dataclass decorator silently did not take for fields."""
    names = {item.name for item in fields(schema)}
    return [name for name in vars(schema) if not name.startswith("_") and name not in names]


def test_every_attribute_of_the_schema_is_a_field() -> None:
    classes = list_dataclasses(JobConfig)
    assert len(classes) == 22  # JobConfig, its 19 sections, model.overrides and its table: the walk sees all of them
    assert {schema.__name__: list_unannotated(schema) for schema in classes} == {
        schema.__name__: [] for schema in classes
    }


def test_an_attribute_without_annotation_is_found() -> None:
    @dataclass
    class Section:
        good: int = setting(1, "Fine.")
        bad = 2  # setting(2, ...) would be refused by dataclass itself

    assert list_unannotated(Section) == ["bad"]


def test_every_setting_has_a_sentence_of_documentation() -> None:
    undocumented = [key for key, item in get_settings().items() if not (item.doc.endswith(".") and item.doc.isascii())]
    assert undocumented == []


def test_every_default_has_the_declared_type() -> None:
    filled_in = {"training.global_batch_size"}  # None again as it is read: test_what_was_filled_in_is_saved
    for key, item in get_settings().items():
        if item.optional and key not in filled_in:
            assert item.default is None, f"{key}: save_resolved leaves None out, so None must be the default"
        else:
            assert type(item.default) is item.kind, key
            assert not item.choices or item.default in item.choices, key


def test_reference_is_current() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == render_reference(), "run python scripts/config_reference.py"


def test_reference_has_one_row_per_setting() -> None:
    text = render_reference()
    assert sum(line.startswith("| `") for line in text.splitlines()) == len(get_settings()) + len(
        get_source_section("NAME")
    )
    assert "\n## [model.overrides]\n" in text
    assert "\n| `steps` | int | `1000` | Optimizer steps to run, unless epochs is set. |\n" in text
    assert '\n| `dtype` | `"float32"` or `"bfloat16"` | `"float32"` | Dtype of stored' in text
    assert "\n| `decay_ratio` | float or none | unset | Share of all steps" in text


def test_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "docs" / "config.md"
    message = (
        f"{path}: is missing or does not match titanlite/config/schema.py. Run python scripts/config_reference.py.\n"
    )
    assert main(["--check"], path) == 1
    assert capsys.readouterr().err == message
    assert main([], path) == 0
    assert main(["--check"], path) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("`1000`", "`1001`", 1), encoding="utf-8")
    assert main(["--check"], path) == 1
    assert capsys.readouterr().err == message


def test_command_refuses_other_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.md"
    assert main(["--chekc"], path) == 2
    assert (
        capsys.readouterr().err
        == "python scripts/config_reference.py: unknown argument '--chekc'. The only one is --check.\n"
    )
    assert not path.exists()
