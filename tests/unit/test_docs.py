"""The README and the documents: links lead somewhere, commands are accepted, examples run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.preflight import main as preflight

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(document):
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_tests_named_in_the_feature_table_exist():
    rows = re.findall(r"`(tests/[^`]+)`", (ROOT / "README.md").read_text())
    assert len(rows) > 5
    missing = [row for row in rows if not (ROOT / row).exists()]
    assert not missing


def commands() -> list[str]:
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.strip() for line in lines if re.match(r"    (NGPU=\d+ )?\./run_train\.sh --config", line)]


@pytest.mark.parametrize("command", commands())
def test_readme_commands_pass_the_preflight_or_fail_as_shown(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    ranks = words.pop(0).removeprefix("NGPU=") if words[0].startswith("NGPU=") else "4"
    code = preflight(["--world-size", ranks, *words[1:]])
    message = capsys.readouterr().err.strip()
    assert (code == 0 and not message) or (code == 2 and message in (ROOT / "README.md").read_text())


def test_readme_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "init normal(std=0.02)" in done.stdout
