"""The collector is off while a program imports, on afterwards, for what is made then, and idle at its end."""

import gc
import subprocess
import sys

import pytest

from titanlite.lean_imports import lean_imports

SCRIPT = """
import atexit, gc
from titanlite.lean_imports import lean_imports

class Cycle:
    def __init__(self, name): self.me, self.name = self, name
    def __del__(self): print(self.name)

with lean_imports():
    imported = gc.get_objects()
    Cycle("imported")
    atexit.register(lambda: print("end", len(gc.get_objects()) > 0))  # before the last freeze
print(len(imported) > 1000, len(gc.get_objects()) < 1000, gc.isenabled())
Cycle("made")
gc.collect()
last = Cycle("last")
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


def test_only_what_is_made_after_the_imports_is_looked_through_and_nothing_at_the_end():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "True", "True", "made", "end", "True"]


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
