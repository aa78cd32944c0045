"""Every feature can go: the package without its folder, and without its lines in assemble.py,
imports and trains.

With it go the features that import it. A line of assemble.py goes if it names something of them;
where only an argument by name, an entry of a dictionary or one of two alternatives does, that goes
alone.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "titanlite" / "features"
# A feature is a folder, or one file.
NAMES = sorted(
    {path.relative_to(FEATURES).parts[0].removesuffix(".py") for path in FEATURES.rglob("*.py")}
    - {"__init__"}
)
USED = [
    name
    for name in NAMES
    if f"titanlite.features.{name}" in (ROOT / "titanlite/assemble.py").read_text()
]
# A process that forks for each copy of the package, after the first with all else imported that it
# needed.
TRAIN = """
import importlib, os, pkgutil, sys
from contextlib import suppress

def train(tree):
    os.dup2(os.open(tree + "/out", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.path.insert(0, tree)
    import titanlite
    assert titanlite.__file__.startswith(tree)
    for module in pkgutil.walk_packages(titanlite.__path__, "titanlite."):
        if not module.name.startswith("titanlite.features"):
            importlib.import_module(module.name)
    from titanlite.rank import main
    code = main(["--config", sys.argv[1], f"--job.dump_folder={tree}/run"])
    with open("modules", "w") as file:
        file.writelines(name + "\\n" for name in sys.modules if not name.startswith("titanlite"))
    return code

for tree in sys.argv[2:]:
    if not (pid := os.fork()):
        code = 1
        try:
            code = train(tree)
        finally:
            if sys.exc_info()[0]:
                sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(code)
    os.waitpid(pid, 0)
    for name in open("modules") if tree == sys.argv[2] else ():
        with suppress(ImportError):
            importlib.import_module(name.strip())
"""


def with_dependents(name):
    """`name` and the features that import it, directly or not."""
    gone = {name}
    while True:
        pattern = re.compile(
            rf"^\s*(?:from|import) titanlite\.features\.(?:{'|'.join(gone)})\b", re.MULTILINE
        )
        users = (path for path in FEATURES.rglob("*.py") if pattern.search(path.read_text()))
        found = {path.relative_to(FEATURES).parts[0].removesuffix(".py") for path in users}
        if found <= gone:
            return gone
        gone |= found


class Cut(ast.NodeTransformer):
    """Deletes from a module what names anything of the features that are `gone`."""

    def __init__(self, gone):
        self.gone, self.names, self.bound = gone, set(), set()

    def is_hit(self, node):
        return node is not None and any(
            isinstance(n, ast.Name) and n.id in self.names for n in ast.walk(node)
        )

    def visit_ImportFrom(self, node):
        if (module := f"{node.module}..".split("."))[1] == "features" and module[2] in self.gone:
            self.names |= {alias.asname or alias.name for alias in node.names}
            return None
        return node

    def visit_IfExp(self, node):
        kept = [part for part in (node.body, node.orelse) if not self.is_hit(part)]
        return self.visit(kept[0]) if len(kept) == 1 else self.generic_visit(node)

    def visit_BoolOp(self, node):
        kept = [part for part in node.values if not self.is_hit(part)]
        node.values = kept or node.values
        return self.visit(kept[0]) if len(kept) == 1 else self.generic_visit(node)

    def visit_Dict(self, node):
        kept = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not self.is_hit(value)
        ]
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        return self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)  # what is left of an inner call stays
        node.keywords = [keyword for keyword in node.keywords if not self.is_hit(keyword.value)]
        return node

    def visit(self, node):
        if isinstance(node, ast.FunctionDef):  # a parameter has a value where an assignment goes
            self.bound |= {argument.arg for argument in node.args.args}
        result = super().visit(node)
        if isinstance(result, ast.Expr | ast.Assign | ast.AugAssign | ast.Return):
            targets = {
                n.id
                for n in ast.walk(result)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            if self.is_hit(result):
                self.names |= targets - self.bound
                return None
            self.bound |= targets
        elif isinstance(result, ast.match_case) and not result.body:
            return None
        elif isinstance(result, ast.stmt) and getattr(result, "body", None) == []:
            result.body = [ast.Pass()]
        return result


def copy_without(gone, tree):
    """Copy the package to `tree` without the features that are `gone`; with bytecode, or each copy
    is compiled anew.
    """
    package = tree / "titanlite"
    shutil.copytree(ROOT / "titanlite", package)
    for name in gone:
        if (folder := package / "features" / name).is_dir():
            shutil.rmtree(folder)
        else:
            folder.with_suffix(".py").unlink()
    module = package / "assemble.py"
    module.write_text(ast.unparse(Cut(gone).visit(ast.parse(module.read_text()))))


def train_without(folder, missing):
    """Return the losses of two steps on text, or what was said instead, for each name of `missing`,
    whose values are features.
    """
    for name, gone in missing.items():
        copy_without(gone, folder / f"without-{name}")
    config = folder / "tiny.toml"
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("To train is to repeat what is not known. " * 200)
    config.write_text(
        '[model]\nname = "qwen3_moe"\nflavor = "debug"\n[model.overrides]\nvocab_size = '
        "260\nnum_layers = 1\n[training]\nsteps = 2\nseq_len = 32\nlocal_batch_size = "
        "1\nglobal_batch_size = 1\n[metrics]\nlog_freq = 1\nenable_tensorboard = false\n"
        f'[data]\ndataset = "text"\npath = "{folder / "text"}"\nbpe_vocab_size = 260\n'
        f'cache_folder = "{folder / "cache"}"\n[checkpoint]\nenable = true\ninterval = 2\n'
    )
    trees = [str(folder / f"without-{name}") for name in missing]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    command = [sys.executable, "-c", TRAIN, str(config), *trees]
    subprocess.run(command, cwd=folder, env=variables, check=True, timeout=600)
    found = {}
    for name, tree in zip(missing, map(Path, trees), strict=True):
        metrics = tree / "run/metrics.jsonl"
        saved = (tree / "run/checkpoint/step-2/config.json").is_file()
        points = map(json.loads, metrics.read_text().splitlines() if saved else [])
        losses = [point["loss/train"] for point in points if "loss/train" in point]
        found[name] = losses or (tree / "out").read_text()[-3000:]
    return found


@pytest.mark.slow
def test_the_rest_trains_without(tmp_path, pytestconfig):
    """Each feature by itself once a week, else three at a time: a copy takes a second."""
    size = 1 if pytestconfig.getoption("--full") else 3
    missing = {"": set(), "all": set(NAMES)}
    for first in range(0, len(USED), size):
        names = USED[first : first + size]
        missing["-".join(names)] = set().union(*map(with_dependents, names))
    losses = train_without(tmp_path, missing)
    assert len(losses[""]) == 2
    # Without `diagnose` other kernels may run: float32 in another order.
    expected = pytest.approx(losses[""], rel=1e-5)
    assert {name: found for name, found in losses.items() if found != expected} == {}
