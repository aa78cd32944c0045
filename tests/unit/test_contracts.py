"""Rules of the code that no linter knows: what may stand where."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titanlite"
READS_ENVIRONMENT = ("base/", "launch/")
# The configuration as a whole: where it is made and checked; the facts of a run, the build order
# and the order of sharding; values of any section that follow the step; features and datasets,
# whose builders get it; and what saves or compares all of it.
KNOWS_JOB = (
    *("config/", "preflight.py", "features/", "data/", "metrics/"),
    *("assemble.py", "run.py", "distributed/parallelize.py", "optim/schedule.py"),
)
# Native and transformers' models are told apart where they are described, built, balanced, sharded
# and written.
TELLS_KINDS = (
    *("config/", "models/families/", "features/", "data/tokenizer.py", "assemble.py", "run.py"),
    *(
        "distributed/parallelize.py",
        "checkpoint/description.py",
        "checkpoint/ties.py",
        "optim/expert_bias.py",
    ),
)
# What a module computes is changed from outside by hooks and documented attributes. One function
# puts another forward in place of a layer's; the others exchange tensors, and give a record its
# fields.
OVERRIDES = (
    *("distributed/parallelize.py", "distributed/fsdp.py", "distributed/shard.py"),
    *(
        "materialize/execute.py",
        "checkpoint/description.py",
        "features/lora/block_formats.py",
        "metrics/point.py",
    ),
    "features/estimate/stand_in.py",
)
KINDS = {"ModelConfig", "TransformersConfig", "Decoder"}


parse = cache(ast.parse)


def find_environment(code):
    """Lines of `code` that read or set an environment variable."""
    return [
        node.lineno
        for node in ast.walk(parse(code))
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("environ", "getenv", "putenv", "unsetenv")
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and node.names[0].name in ("environ", "getenv")
        )
    ]


def find_job(code):
    """Lines of `code` that name the whole configuration."""
    nodes = (
        node
        for node in ast.walk(parse(code))
        if isinstance(node, ast.Name | ast.alias | ast.Attribute)
    )
    return [
        n.lineno
        for n in nodes
        if "JobConfig" in [getattr(n, key, "") for key in ("id", "name", "attr")]
    ]


def find_kinds(code):
    """Lines of `code` that ask which kind of model there is."""
    calls = (
        node for node in ast.walk(parse(code)) if isinstance(node, ast.Call) and len(node.args) == 2
    )
    asked = (
        call
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass")
    )
    return [
        call.lineno
        for call in asked
        if KINDS & {n.id for n in ast.walk(call.args[1]) if isinstance(n, ast.Name)}
    ]


def find_overrides(code):
    """Lines of `code` that give an object another forward, another class, or attributes past its
    class.
    """
    lines = []
    for node in ast.walk(ast.parse(code)):
        found = False
        if isinstance(node, ast.Attribute):
            is_dict = ast.unparse(node.value).startswith("vars(") and node.attr in (
                "update",
                "pop",
                "setdefault",
            )
            is_written = not isinstance(node.ctx, ast.Load)
            found = (
                node.attr == "__dict__"
                or is_dict
                or (is_written and node.attr in ("forward", "__class__"))
            )
        elif isinstance(node, ast.Subscript):
            found = not isinstance(node.ctx, ast.Load) and ast.unparse(node.value).startswith(
                "vars("
            )
        elif isinstance(node, ast.Call):
            names = [ast.unparse(value) for value in node.args[1:2]]
            found = ast.unparse(node.func) == "setattr" and names == ["'forward'"]
        if found and isinstance(node, ast.expr):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("find", "places", "remedy"),
    [
        (find_environment, READS_ENVIRONMENT, "base/process.py is asked"),
        (find_job, KNOWS_JOB, "a function takes the section or the values that it uses"),
        (find_overrides, OVERRIDES, "a hook or a documented attribute of the module is set"),
        (
            find_kinds,
            TELLS_KINDS,
            "the model's interface, or an attribute that both kinds have, is asked",
        ),
    ],
)
def test_it_stands_in_its_places_alone(find, places, remedy):
    files = {
        path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")
    }
    found = {name: lines for name, code in files.items() if (lines := find(code))}
    assert not {name: lines for name, lines in found.items() if not name.startswith(places)}, (
        f"elsewhere {remedy}"
    )
    unused = [place for place in places if not any(name.startswith(place) for name in found)]
    assert not unused, "they need it no longer: leave them out"


def test_each_feature_is_in_both_lists_of_layers():
    """Without this, a feature that only the second list has could import any room."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    rooms, features, _ = settings["tool"]["importlinter"]["contracts"]
    among_rooms = re.findall(r"features\.(\w+)", " ".join(rooms["layers"]))
    assert sorted(among_rooms) == sorted(re.findall(r"\w+", " ".join(features["layers"])))
