"""What entry points import torch with: Python's garbage collector never looks at what is imported."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import what a program needs in this; the collector is off meanwhile, and leaves it alone later and at exit.

    torch and what it imports are a million objects that live as long as the process. The collector goes through them
    again and again, while they are made and while others are, and once more before they are dropped one by one: a third
    of the 4 CPU seconds of a rank that imports everything and ends. Finalizers of objects in cycles do not run at exit:
    close files explicitly.
    """
    enabled = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # registered before others, and so called after them
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
