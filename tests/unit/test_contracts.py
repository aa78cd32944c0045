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
    "config/",
    "preflight.py",
    "features/",
    "data/",
    "metrics/",
    "assemble.py",
    "run.py",
    "distributed/parallelize.py",
    "optim/schedule.py",
)
# Native and transformers' models are told apart where they are described, built, balanced, sharded
# and written.
TELLS_KINDS = (
    "config/",
    "models/families/",
    "features/",
    "data/tokenizer.py",
    "assemble.py",
    "run.py",
    "distributed/parallelize.py",
    "checkpoint/description.py",
    "checkpoint/ties.py",
    "optim/expert_bias.py",
)
# What a module computes is changed from outside by hooks and documented attributes. One function
# puts another forward in place of a layer's; the others exchange tensors, and give a record its
# fields.
OVERRIDES = (
    "distributed/parallelize.py",
    "distributed/fsdp.py",
    "distributed/shard.py",
    "materialize/execute.py",
    "checkpoint/description.py",
    "features/lora/block_formats.py",
    "metrics/point.py",
    "features/estimate/stand_in.py",
)
# What stands in a line of the code as `ast.unparse` writes it.
ENVIRONMENT = r"\b(environ|getenv|putenv|unsetenv)\b"
JOB = r"\bJobConfig\b"
KINDS = r"\b(isinstance|issubclass)\(.*\b(ModelConfig|TransformersConfig|Decoder)\b"
IN_PLACE = (
    r"\.__dict__|vars\([^)]*\)(\[[^]]*\] = |\.(update|pop|setdefault)\()|\bdel vars\("
    r"|\.(forward|__class__) = |setattr\([^,]*, 'forward'"
)


@cache
def read_package():
    """Return the code of each module without comments, a statement in each line."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.unparse(ast.parse(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    }


@pytest.mark.parametrize(
    ("pattern", "places", "remedy"),
    [
        (ENVIRONMENT, READS_ENVIRONMENT, "base/process.py is asked"),
        (JOB, KNOWS_JOB, "a function takes the section or the values that it uses"),
        (IN_PLACE, OVERRIDES, "a hook or a documented attribute of the module is set"),
        (
            KINDS,
            TELLS_KINDS,
            "the model's interface, or an attribute that both kinds have, is asked",
        ),
    ],
)
def test_it_stands_in_its_places_alone(pattern, places, remedy):
    found = {name for name, code in read_package().items() if re.search(pattern, code)}
    assert not {name for name in found if not name.startswith(places)}, f"elsewhere {remedy}"
    unused = [place for place in places if not any(name.startswith(place) for name in found)]
    assert not unused, "they need it no longer: leave them out"


def test_each_feature_is_in_both_lists_of_layers():
    """Without this, a feature that only the second list has could import any room."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    rooms, features, _ = settings["tool"]["importlinter"]["contracts"]
    among_rooms = re.findall(r"features\.(\w+)", " ".join(rooms["layers"]))
    assert sorted(among_rooms) == sorted(re.findall(r"\w+", " ".join(features["layers"])))
