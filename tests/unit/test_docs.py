"""The README and the documents: links lead somewhere, commands are accepted, examples run."""

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from processes import run_python

from titanlite.__main__ import _MODULES
from titanlite.config import load_config
from titanlite.config.settings import TABLES, find_setting, get_settings
from titanlite.preflight import main as preflight

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("[A-B]*.md"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)


# Comments of these are documentation, too.
COMMENTED = sorted(
    [*(ROOT / "configs").rglob("*.toml"), *(ROOT / "scripts").rglob("*.sh"), *ROOT.glob("*.sh")]
)
COMMENTED += sorted((ROOT / "scripts").rglob("*.py")) + sorted(
    (ROOT / "scripts/clusters").glob("*.yaml")
)
# An example of a mistake.
WRONG_KEYS = {"training.step"}


def test_relative_links_lead_to_files():
    for document in DOCUMENTS:
        targets = re.findall(r"\]\(([^)#: ]+)\)", document.read_text())
        assert not [target for target in targets if not (document.parent / target).exists()], (
            document.name
        )


def test_links_within_documents_lead_to_headings():
    links = [
        (page, *link)
        for page in DOCUMENTS
        for link in re.findall(r"\]\(([^)#: ]*)#([^) ]+)\)", page.read_text())
    ]
    missing = []
    for document, path, anchor in links:
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.*)", target.read_text(), flags=re.M)
        known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if anchor not in known:
            missing.append(f"{document.name}: {path}#{anchor}")
    assert not missing


def test_every_claim_names_a_test():
    claims = re.findall(r"^- (.*(?:\n  .*)*)", (ROOT / "docs/claims.md").read_text(), flags=re.M)
    assert len(claims) > 25
    assert not [claim for claim in claims if "`tests/" not in claim]


def test_the_map_names_every_file_of_the_core_and_every_feature():
    size = runpy.run_path(str(ROOT / "scripts/check_size.py"))
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "titanlite").rglob("*.py")]
    core = {Path(file).name for file in files if size["part_of"](file) == "core"} - {"__init__.py"}
    text = (ROOT / "docs/architecture.md").read_text()
    _, _, core_part = text.partition("## The core, file by file")
    assert set(re.findall(r"\w+\.py", core_part.partition("## Extension points")[0])) == core
    rows = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/features.md").read_text(), flags=re.M))
    features = {Path(file).parts[2] for file in files if size["part_of"](file) == "features"}
    assert rows == {name.removesuffix(".py") for name in features} - {"__init__"}


def test_pages_for_other_trainers_name_settings_that_exist():
    """Rows of the pages for people who come from another trainer: its keys, ours."""
    wrong = []
    for name in ("from_torchtitan", "from_axolotl", "from_trl"):
        text = (ROOT / f"docs/{name}.md").read_text()
        rows = re.findall(r"^\| (?!--)(.+?) \| (.+?) \|.*\|$", text, flags=re.M)
        assert len(rows) > 12
        for _, here in rows:
            keys = re.findall(r"`([\w.]+)`", here)
            wrong += [key for key in keys if find_setting(key.replace("NAME", "a")) is None]
            if not keys and here not in ("nothing", "here"):
                wrong.append(here)
    assert not wrong


def test_configurations_that_are_shown_are_accepted(tmp_path, monkeypatch):
    """All of them are configurations, if only of some sections."""
    for document in DOCUMENTS:
        monkeypatch.chdir(tmp_path)
        for text in re.findall(r"```toml\n(.*?)```", document.read_text(), flags=re.S):
            Path("shown.toml").write_text(text)
            model = (
                []
                if tomllib.loads(text).get("model", {}).keys() & {"path", "flavor"}
                else ["--model.path=a/b"]
            )
            load_config(["--config", "shown.toml", *model])


def test_settings_that_are_named_exist():
    """`--section.key`, and `section.key` in backticks where there is such a section."""
    for document in [*DOCUMENTS, *COMMENTED]:
        text, settings = document.read_text(), get_settings()
        if document.name.startswith("from_"):
            text = re.sub(r"^\|.*?\|", "|", text, flags=re.M)  # names of another trainer
        sections = {key.partition(".")[0] for key in settings}
        named = re.findall(r"(?<![\w-])--([a-z_]+\.[a-z_]+(?:\.[a-z_]+)*)", text)
        named += [
            key
            for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?=[`= ])", text)
            if key.partition(".")[0] in sections
        ]
        files = {
            "model.safetensors",
            "optimizer.safetensors",
            "metrics.jsonl",
            "optimizer.found_inf",
        }
        # names of the user
        named = [re.sub(rf"(\.(?:{'|'.join(TABLES)}))\.\w+$", r"\1", name) for name in named]
        prefixes = {f"{key.rpartition('.')[0]}" for key in settings}  # `model.overrides`
        unknown = (
            {name for name in named if find_setting(name) is None}
            - files
            - prefixes
            - {"section.key", "a.b"}
        )
        assert unknown <= WRONG_KEYS and not WRONG_KEYS & settings.keys(), document.name


def test_commands_and_modules_that_are_named_exist():
    for document in [*DOCUMENTS, *COMMENTED]:
        text = document.read_text()
        # The options of torchrun and of the launcher may stand between.
        for name in re.findall(r"python3? -m titanlite ([a-z]+)\b", text):
            assert name in _MODULES, f"there is no command '{name}'"
        for module in re.findall(r"-m (titanlite\.[\w.]+)", text):
            assert importlib.util.find_spec(module.rstrip(".")) is not None, module


def test_files_that_are_named_exist():
    """Paths in backticks or commands that begin with a folder of this repository, as they are or
    below titanlite/.
    """
    for document in DOCUMENTS:
        text = document.read_text()
        named = re.findall(
            r"(?<![\w/.-])((?:titanlite|tests|scripts|configs|docs)/[\w./-]*\w)", text
        )
        short = re.findall(r"`((?!tests/|scripts/|titanlite/)[a-z_]+/[a-z_]+\.py)`", text)
        named += [f"titanlite/{path}" for path in short]
        missing = {path for path in named if not (ROOT / path).exists()}
        # What checkpoints hold, and what setup makes.
        missing = {path for path in missing if not (document.parent / path).exists()}
        missing -= {
            path
            for path in missing
            if path.startswith("titanlite/") and path.endswith((".json", ".safetensors"))
        }
        assert missing <= {"titanlite/weights"}, document.name


def test_readme_commands_pass_the_preflight(capsys, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    make = str(ROOT / "scripts/arithmetic/make_arithmetic.py")
    subprocess.run(
        [sys.executable, make],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(
        r"^(?:NGPU=\d+ )?\./run_train\.sh --config configs/.*", readme, flags=re.M
    )
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command)
        ranks = words.pop(0).removeprefix("NGPU=") if words[0].startswith("NGPU=") else "4"
        assert preflight(["--world-size", ranks, *words[1:]]) == 0, command
        assert not capsys.readouterr().err


def test_materialize_example_runs():
    example, *_ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/materialize.md").read_text(), flags=re.S
    )
    done = run_python(example, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "error"})
    assert done.returncode == 0, done.stderr
    assert "init normal(std=0.02)" in done.stdout


def test_the_readme_counts_our_lines_as_it_says():
    files = [path for folder in ("titanlite", "scripts") for path in (ROOT / folder).rglob("*.py")]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    said = int(
        re.search(r"\| thousand lines of Python\S* \| (\d+) \|", (ROOT / "README.md").read_text())[
            1
        ]
    )
    assert abs(said - lines / 1000) < 1.5, f"{lines} lines"
