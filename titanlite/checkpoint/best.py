"""`best`: a link beside the checkpoints that leads to the best of them, or is not there.

It is moved in one step, and only to a complete checkpoint; what it leads to is not removed while it does. A link that
leads nowhere, because someone removed the folder, is taken away when a run starts.
"""

import os
from pathlib import Path

from titanlite.base.log import logger
from titanlite.checkpoint.commit import check_folder, list_steps, step_folder

LINK = "best"


def read_best(folder: Path) -> int | None:
    """Return the step that `folder`/best leads to, complete or not; None if there is no such link."""
    try:
        target = os.readlink(folder / LINK)
    except OSError:  # not there, or not a link
        return None
    name, _, number = target.partition("-")
    return int(number) if name == "step" and number.isdecimal() else None


def point_best(folder: Path, step: int) -> None:
    """Let the link lead to step-`step`, if that is complete. One process at a time.

    Raises OSError: the file system has no links, or something else has the name.
    """
    if read_best(folder) == step or check_folder(step_folder(folder, step)):
        return
    temporary = folder / f".{LINK}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"step-{step}")  # relative: the run's folder may be moved
    os.replace(temporary, folder / LINK)


def repair_best(folder: Path, best: int | None) -> None:
    """At the start of a run whose best step was `best`: a link that leads nowhere goes, one that was not set comes."""
    linked = read_best(folder)
    there = set(list_steps(folder))
    complete = {
        step
        for step in (linked, best)
        if step is not None and step in there and not check_folder(step_folder(folder, step))
    }
    try:
        if best is not None and (best in complete or linked is None):
            point_best(folder, best)
        elif linked is not None and linked not in complete:
            (folder / LINK).unlink()
            logger.warning("checkpoint: %s led to step-%d, which is not complete; removed it", folder / LINK, linked)
    except OSError as error:
        logger.warning("checkpoint: cannot mend %s: %s", folder / LINK, error)
