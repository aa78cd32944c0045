"""The reference page follows the schema, and the schema is complete."""

import runpy
from pathlib import Path

from titanlite.config.settings import get_settings

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/config_reference.py"))
REFERENCE, render_reference = SCRIPT["REFERENCE"], SCRIPT["render_reference"]


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
