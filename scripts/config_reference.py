#!/usr/bin/env python
"""Write docs/config.md, the reference of the configuration, from the schema; with --check only
compare.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.base.extension import FORM
from titanlite.config.settings import (
    SOURCES,
    Setting,
    format_value,
    get_sections,
    get_source_section,
)

REFERENCE = Path(__file__).parents[1] / "docs" / "config.md"
COMMAND = "python scripts/config_reference.py"

_HEADER = f"""\
# Configuration reference

<!-- Made by `{COMMAND}` from titanlite/config. Do not edit. -->

A setting is a key of a section in the TOML file, or `--section.key=value` on the command line,
where the last one wins. The value of an override is read as the type below, and never as a guessed
type; `none` unsets a setting that may be unset.
"""


def _format_type(setting: Setting) -> str:
    """`int`, `float or none`, or the choices of a Literal."""
    kinds = [f"`{format_value(choice)}`" for choice in setting.choices] or [setting.kind.__name__]
    kind = " or ".join([*kinds, *([] if setting.calls is None else [f"`{format_value(FORM)}`"])])
    return f"{kind} or none" if setting.optional else kind


def _format_default(setting: Setting) -> str:
    return "unset" if setting.default is None else f"`{format_value(setting.default)}`"


def render_reference() -> str:
    """The Markdown text of docs/config.md: one table of key, type, default and description per
    section.
    """
    lines = [_HEADER]
    sections = get_sections() | {f"{SOURCES}.NAME": get_source_section("NAME")}
    for section, settings in sections.items():
        lines += [
            f"## [{section}]",
            "",
            "| key | type | default | description |",
            "|---|---|---|---|",
        ]
        for setting in settings:
            cells = (
                f"`{setting.name}`",
                _format_type(setting),
                _format_default(setting),
                setting.doc,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str], path: Path = REFERENCE) -> int:
    """Write the reference to `path`; with `--check` only compare. Returns the exit status.

    Raises:
        OSError: `path` cannot be written.
    """
    if unknown := [argument for argument in argv if argument != "--check"]:
        print(
            f"{COMMAND}: unknown argument {unknown[0]!r}. The only one is --check.", file=sys.stderr
        )
        return 2
    if not argv:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_reference(), encoding="utf-8", newline="\n")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == render_reference():
        return 0
    print(
        f"{path}: is missing or does not match titanlite/config/schema.py. Run {COMMAND}.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
