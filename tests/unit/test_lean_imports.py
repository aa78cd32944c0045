"""The collector is off while a program imports, on afterwards, and idle at its end."""

import gc
import subprocess
import sys

import pytest

from titanlite.lean_imports import lean_imports

SCRIPT = """
import atexit, gc
from titanlite.lean_imports import lean_imports

class Cycle:
    def __init__(self): self.me = self
    def __del__(self): print("collected")

with lean_imports():
    Cycle()
    atexit.register(lambda: print(gc.get_freeze_count()))  # before the freeze
gc.collect()
print(gc.isenabled())
last = Cycle()
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_before_also_after_a_failed_import(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with lean_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ImportError), lean_imports():
            import titanlite.not_there  # pyright: ignore[reportMissingImports]  # noqa: F401
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_what_is_left_at_the_end_is_not_looked_through():
    """The first cycle is collected by the script, after the import; the last one would be at exit."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["collected", "True", "0"]


@pytest.mark.parametrize("module", ["titanlite.train", "titanlite.launch", "titanlite.__main__"])
def test_entry_points_import_without_the_collector_and_leave_it_on(module):
    """Importing titanlite.train takes 5 collections of everything otherwise."""
    script = f"""
import contextlib, gc, {module} as entry
if "{module}".endswith("__main__"):
    with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
        entry.main(["inspect", "--help"])
print("torch" in __import__("sys").modules, gc.isenabled(), gc.get_stats()[2]["collections"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True", "0"]
