"""The reference page follows the schema, and the schema is complete."""

import runpy
from dataclasses import fields, is_dataclass
from pathlib import Path

from titanlite.config import JobConfig
from titanlite.config.settings import get_settings

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/config_reference.py"))
REFERENCE, render_reference = SCRIPT["REFERENCE"], SCRIPT["render_reference"]


def list_dataclasses(schema):
    """`schema` and the dataclasses its fields default to."""
    inner = [type(getattr(schema(), item.name)) for item in fields(schema)]
    return [
        schema,
        *(found for kind in inner if is_dataclass(kind) for found in list_dataclasses(kind)),
    ]


def list_unannotated(schema):
    """Attributes that the dataclass decorator silently did not take for fields."""
    names = {item.name for item in fields(schema)}
    return [name for name in vars(schema) if not name.startswith("_") and name not in names]


def test_every_attribute_of_the_schema_is_a_field():
    classes = list_dataclasses(JobConfig)
    # JobConfig, its 18 sections, model.overrides and its table: the walk sees all of them
    assert len(classes) == 21
    assert {schema.__name__: list_unannotated(schema) for schema in classes} == {
        schema.__name__: [] for schema in classes
    }


def test_every_setting_has_a_sentence_of_documentation():
    undocumented = [
        key
        for key, item in get_settings().items()
        if not (item.doc.endswith(".") and item.doc.isascii())
    ]
    assert undocumented == []


def test_every_default_has_the_declared_type():
    # None again as it is read: test_what_was_filled_in_is_saved
    filled_in = {"training.global_batch_size"}
    for key, item in get_settings().items():
        if item.optional and key not in filled_in:
            assert item.default is None, (
                f"{key}: save_resolved leaves None out, so None must be the default"
            )
        else:
            assert type(item.default) is item.kind, key
            assert not item.choices or item.default in item.choices, key


def test_reference_is_current():
    assert REFERENCE.read_text(encoding="utf-8") == render_reference(), (
        "run python scripts/config_reference.py"
    )
