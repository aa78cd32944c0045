"""The README and the documents: links lead somewhere, commands are accepted, examples run."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.__main__ import _MODULES
from titanlite.config.settings import find_setting, get_settings
from titanlite.preflight import main as preflight

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


# Comments of these are documentation, too.
COMMENTED = sorted([*(ROOT / "configs").rglob("*.toml"), *(ROOT / "scripts").rglob("*.sh"), *ROOT.glob("*.sh")])
COMMENTED += sorted((ROOT / "scripts").rglob("*.py")) + sorted((ROOT / "scripts/launch").glob("*.yaml"))
# An example of a mistake.
WRONG_KEYS = {"training.step"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(document):
    targets = re.findall(r"\]\(([^)#: ]+)\)", document.read_text())
    assert not [target for target in targets if not (document.parent / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_documents_lead_to_headings(document):
    missing = []
    for path, anchor in re.findall(r"\]\(([^)#: ]*)#([^) ]+)\)", document.read_text()):
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.*)", target.read_text(), flags=re.M)
        known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if anchor not in known:
            missing.append(f"{path}#{anchor}")
    assert not missing


def test_tests_named_in_the_feature_table_exist():
    rows = re.findall(r"`(tests/[^`]+)`", (ROOT / "README.md").read_text())
    assert len(rows) > 5
    missing = [row for row in rows if not (ROOT / row).exists()]
    assert not missing


@pytest.mark.parametrize("document", [*DOCUMENTS, *COMMENTED], ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_that_are_named_exist(document):
    """`--section.key`, and `section.key` in backticks where there is such a section."""
    text, settings = document.read_text(), get_settings()
    sections = {key.partition(".")[0] for key in settings}
    named = re.findall(r"(?<![\w-])--([a-z_]+\.[a-z_]+(?:\.[a-z_]+)*)", text)
    named += [key for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?=[`= ])", text) if key.partition(".")[0] in sections]
    files = {"model.safetensors", "optimizer.safetensors", "metrics.jsonl", "optimizer.found_inf"}
    prefixes = {f"{key.rpartition('.')[0]}" for key in settings}  # `model.overrides`
    unknown = {name for name in named if find_setting(name) is None} - files - prefixes - {"section.key", "a.b"}
    assert unknown <= WRONG_KEYS and not WRONG_KEYS & settings.keys()


@pytest.mark.parametrize("document", [*DOCUMENTS, *COMMENTED], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_modules_that_are_named_exist(document):
    text = document.read_text()
    # The options of torchrun and of the launcher may stand between.
    for name in re.findall(r"python3? -m titanlite ([a-z]+)\b", text):
        assert name in _MODULES, f"there is no command '{name}'"
    for module in re.findall(r"-m (titanlite\.[\w.]+)", text):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document):
    """Paths in backticks or commands that begin with a folder of this repository, as they are or below titanlite/."""
    text = document.read_text()
    named = re.findall(r"(?<![\w/.-])((?:titanlite|tests|scripts|configs|docs)/[\w./-]*\w)", text)
    short = re.findall(r"`((?!tests/|scripts/)[a-z_]+/[a-z_]+\.py)`", text)
    named += [f"titanlite/{path}" for path in short]
    missing = {path for path in named if not (ROOT / path).exists()}
    # What checkpoints hold, and what setup makes.
    missing = {path for path in missing if not (document.parent / path).exists()}
    missing -= {path for path in missing if path.startswith("titanlite/") and path.endswith((".json", ".safetensors"))}
    assert missing <= {"titanlite/weights"}


def commands() -> list[str]:
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line for line in lines if re.match(r"(NGPU=\d+ )?\./run_train\.sh --config", line)]


@pytest.mark.parametrize("command", commands())
def test_readme_commands_pass_the_preflight_or_fail_as_shown(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    ranks = words.pop(0).removeprefix("NGPU=") if words[0].startswith("NGPU=") else "4"
    code = preflight(["--world-size", ranks, *words[1:]])
    message = capsys.readouterr().err.strip()
    assert (code == 0 and not message) or (code == 2 and message in (ROOT / "README.md").read_text())


def test_readme_has_commands():
    assert len(commands()) >= 5


def test_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "init normal(std=0.02)" in done.stdout
