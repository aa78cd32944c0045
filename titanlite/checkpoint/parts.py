"""A save of which a part fails keeps the rest: the state of a run is worth more than a file beside it."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from titanlite.base.agree import gather_objects, is_lost_peer, merge_problems
from titanlite.base.errors import TransientError
from titanlite.base.log import logger
from titanlite.checkpoint.folder import ADAPTER_FILE

_T = TypeVar("_T")
MODEL, ADAPTERS, STATES = "the model's own form", ADAPTER_FILE, "optimizer states"
CARD, PROGRESS = "README.md", "train_state.json"
_REMEDIES = {
    MODEL: "All weights are kept, and a resume reads them. Finish the model with: python -m titanlite export {} OUT.",
    ADAPTERS: "All adapters are kept, and a resume reads them. Run the same command again: it saves {} anew.",
    STATES: "A run cannot resume from it. Begin one with model.path = {}.",
    PROGRESS: "A run cannot resume from it. Begin one with model.path = {}.",
    CARD: "Nothing else is missing in {}.",
}


class Parts:
    """What is built for one save, and which parts of it failed.

    Args:
        group: ranks that save together, used for nothing else, for a rank that fails is out of step.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._failed = group, dict[str, str]()

    def attempt(self, part: str, build: Callable[[], _T]) -> _T | None:
        """Return what `build` returns, or None on all ranks if it fails on any. Collective: every rank must call.

        Raises TransientError: `build` failed here alone, and the others wait in a collective of it for too long.
        """
        result, mine = None, list[str]()
        try:
            result = build()
        except Exception as error:  # whatever it is, the other parts are saved
            if is_lost_peer(error):
                raise
            mine.append(self._describe(error))
        try:
            problems = merge_problems(gather_objects(mine, self._group))
        except RuntimeError as lost:
            if not mine:
                raise
            raise TransientError(
                f"checkpoint: rank {dist.get_rank()} alone cannot build {part}: {mine[0]}. "
                "The others wait for it. The same command resumes from the newest checkpoint."
            ) from lost
        if problems:
            self._failed[part] = "; ".join(problems)
        return None if problems else result

    def attempt_here(self, part: str, build: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """Return the files that `build` returns, on rank 0; elsewhere, or if it fails, none."""
        if dist.get_rank(self._group) == 0:
            try:
                return build()
            except Exception as error:  # noqa: BLE001 - as above
                self._failed[part] = self._describe(error)
        return {}

    def explain(self, folder: Path) -> str:
        """Return what failed of the checkpoint in `folder`, and how to go on; empty if nothing did."""
        if not self._failed:
            return ""
        failed = "; ".join(f"{part} ({problem})" for part, problem in self._failed.items())
        remedies = dict.fromkeys(_REMEDIES[part].format(folder) for part in self._failed)
        return f"checkpoint: {folder} was saved without {failed}. {' '.join(remedies)}"

    def _describe(self, error: Exception) -> str:
        logger.error("%s", "".join(traceback.format_exception(error)))
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
