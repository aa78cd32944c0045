"""Where a run begins: at its newest complete checkpoint, or at step 0."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from titanlite.base.agree import gather_objects, get_rank, on_first_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.base.events import record_event
from titanlite.base.log import logger
from titanlite.base.text import list_names
from titanlite.checkpoint.commit import check_folder, clean_up, list_steps, step_folder
from titanlite.checkpoint.train_state import STATE_FILE, Progress
from titanlite.config.schema import CheckpointSection


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run resumes from."""

    folder: Path
    progress: Progress


def look_for_start(section: CheckpointSection, dump_folder: str) -> Start | None:
    """Find where the run in `dump_folder` would begin, by the sizes of files alone. Call in one
    process; changes no files.

    Raises CheckpointError: as `find_start`.
    """
    folder = _choose(section, Path(dump_folder) / section.folder, [])
    return None if folder is None else Start(folder, Progress.read(folder))


def find_start(
    section: CheckpointSection, dump_folder: str, group: dist.ProcessGroup | None = None
) -> Start | None:
    """Find and verify the checkpoint that this run resumes from; None for a new run.

    The caller holds the run's folder: leftovers of killed processes there are removed.

    Raises CheckpointError, on all ranks: the requested checkpoint is missing or incomplete, or the
    folder has later checkpoints. Collectives: some small ones over `group`; between them, each rank
    reads a part of the files. Every rank must call.
    """
    checkpoints = Path(dump_folder) / section.folder
    passed_over: list[int] = []
    if section.enable and get_rank() == 0:
        clean_up(checkpoints)
    while True:
        folder = on_first_rank(lambda: _choose(section, checkpoints, passed_over), group)
        if folder is None:
            return None
        problems: list[str] = []
        if section.verify_checksums:
            stripe = (dist.get_rank(), dist.get_world_size())
            mine = check_folder(folder, checksums=True, stripe=stripe)
            problems = [problem for found in gather_objects(mine, group) for problem in found]
        if not problems:
            break
        if section.load_step > 0:
            raise_problems(CheckpointError, f"checkpoint {folder}", problems)
        if get_rank() == 0:
            passed_over.append(_pass_over(folder, problems))
    logger.info("checkpoint: resuming from %s", folder)
    return Start(folder, on_first_rank(lambda: Progress.read(folder), group))


def _choose(section: CheckpointSection, checkpoints: Path, passed_over: list[int]) -> Path | None:
    """Return the newest complete checkpoint by the sizes of its files, or the requested one.

    Checkpoints in `passed_over` are left out; incomplete ones are added to it. Call in one process.
    """
    asked = section.load_step
    complete: list[int] = []
    for step in reversed(list_steps(checkpoints)) if section.enable else ():
        if step in passed_over:
            continue
        folder = step_folder(checkpoints, step)
        problems = check_folder(folder)
        if not problems and not (folder / STATE_FILE).exists():
            problems = [f"{STATE_FILE}: missing, a run cannot resume without it."]
        if not problems:
            complete.append(step)
            if asked < 0:
                break
        elif step == asked:
            raise_problems(CheckpointError, f"checkpoint {folder}", problems)
        elif asked < 0:
            passed_over.append(_pass_over(folder, problems))
    if asked > 0 and section.enable and asked not in complete:
        raise CheckpointError(
            f"checkpoint.load_step: {checkpoints} has no step-{asked}. Complete "
            f"checkpoints there: {list_names(reversed(complete)) or 'none'}."
        )
    if asked >= 0 and complete and complete[0] > asked:
        raise CheckpointError(
            f"checkpoint.load_step = {asked}: {checkpoints} holds step-{complete[0]} of an "
            "earlier run, which the next resume would choose over what this run saves. "
            "Move the later checkpoints away, or set another job.dump_folder."
        )
    return step_folder(checkpoints, complete[0]) if complete and asked else None


def _pass_over(folder: Path, problems: list[str]) -> int:
    """Warn why the run does not resume from `folder`, which a save of the same step will replace.
    Return its step.
    """
    more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
    text = f"{folder} is passed over: {problems[0]}{more}"
    logger.warning("checkpoint: %s", text)
    record_event("damaged", text, -1)
    return int(folder.name.removeprefix("step-"))
