"""`Checkpointer`: saves the checkpoints of a run, and removes old ones."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from titanlite.base.agree import on_first_rank, together
from titanlite.base.errors import CheckpointError, TitanliteError, TransientError
from titanlite.base.events import record_event
from titanlite.base.log import logger
from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import step_folder
from titanlite.checkpoint.hf_model import HFFormat, index_of, warn_of_sidecar
from titanlite.checkpoint.train_state import (
    STATE_FILE,
    Progress,
    state_files,
)
from titanlite.checkpoint.writer import FileLayout, snapshot
from titanlite.config.schema import CheckpointSection
from titanlite.materialize import Plan


class Checkpointer:
    """Saves the checkpoints `step-N` of one run. Every rank builds one; all methods are collective.

    A context manager: if training ends with an error, a save in the background is finished first.

    Args:
        saved_as: format of the model's files in the checkpoints.
        saved_step: step of the checkpoint that the run resumes from, or -1.
        group: a process group of all ranks on the host, with a long timeout, because one rank may
            read or write longer than another. Collectives of a background save must not interleave
            with collectives of training.
    """

    def __init__(
        self,
        section: CheckpointSection,
        saved_as: HFFormat,
        dump_folder: Path,
        saved_step: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._section = section
        self._format = saved_as
        self.folder = dump_folder / section.folder
        self.group = group
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._pending: Future[None] | None = None
        self._copies: dict[Any, torch.Tensor] = {}
        self._description: dict[str, bytes] = {}
        self._carried: Any = None
        self._certify: Callable[[int], commit.Certify] | None = None
        self.carried_bytes = 0
        self._saved_step = saved_step

    def is_due(self, step: int) -> bool:
        section = self._section
        return section.enable and section.interval > 0 and step % section.interval == 0

    def has_saved(self, step: int) -> bool:
        """Return True if the checkpoint that this run saved last, or resumed from if it has saved
        none, is that of `step`.
        """
        return self._saved_step == step

    def describe(self, build: Callable[[Mapping[str, bytes]], Mapping[str, bytes]]) -> None:
        """Add files without tensors (content by file name) to every checkpoint. `build` makes them
        on rank 0, before training, from the files that were added before.

        Raises CheckpointError, on all ranks: a file cannot be built, or transformers rejects it.
        """
        if self._section.enable:  # the files stay on rank 0: a tokenizer is too large to broadcast
            on_first_rank(lambda: self._description.update(build(self._description)), self.group)

    def carry(self, carried: Any) -> None:
        """Add tensors that the model does not compute to every checkpoint: see
        `features/passthrough.py`. Raises as `describe`.
        """
        self._carried = carried
        self.carried_bytes = carried.nbytes
        self.describe(carried.describe)

    def certify(self, certify: Callable[[int], commit.Certify]) -> None:
        """Let `certify(step)` make further files for every checkpoint: see `features/verify`."""
        self._certify = certify

    def save(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        card: Callable[[], str],
    ) -> None:
        """Save `step-N`; once per step. In asynchronous mode training continues as soon as the
        shards are copied.

        `card` renders the README.md on rank 0, or "" for none.

        Raises CheckpointError, on all ranks, if `checkpoint.on_save_error` is "stop": this save
        failed, or the previous one, which ran in the background.
        """
        if not self._section.enable or progress.step == self._saved_step:
            return
        self.wait()
        with self._on_save_error(progress.step):
            began = time.perf_counter()
            folder = step_folder(self.folder, progress.step)
            files: list[FileLayout] = []
            with together(self.group), commit.saving(folder):
                files = self._lay_out(plan) + state_files(plan, optimizer)
            rest = self._description | index_of(files) | {STATE_FILE: progress.to_json()}
            readme = card() if dist.get_rank() == 0 else ""
            if readme:
                rest["README.md"] = readme.encode()
            self._saved_step = progress.step
            if self._section.async_mode == "disabled":
                self._write(folder, files, rest, progress)
                return
            files, self._copies = snapshot(files, self._copies)
            self._pending = self._pool.submit(self._write, folder, files, rest, progress)
            text = "checkpoint: step %d copied in %.2f s, written in the background"
            logger.info(text, progress.step, time.perf_counter() - began)

    def _lay_out(self, plan: Plan) -> list[FileLayout]:
        files = self._format.files(plan)
        warn_of_sidecar(plan.model.config, files)
        return files if self._carried is None else self._carried.add_to(files)

    def _write(
        self,
        folder: Path,
        files: Sequence[FileLayout],
        rest: Mapping[str, bytes],
        progress: Progress,
    ) -> None:
        certify = self._certify and self._certify(progress.step)
        commit.commit_folder(folder, files, rest, self.group, certify)
        if self._carried is not None:
            self._carried.follow(folder, files)
        record_event("save", f"checkpoint {folder.name}", progress.step)
        if dist.get_rank() == 0:
            self._tidy(progress)

    def _tidy(self, progress: Progress) -> None:
        """Mark the best checkpoint and remove old ones, after the checkpoint of `progress` is
        complete. Call in one process.
        """
        try:
            section = self._section
            best = self._best_step(progress)
            if best is not None:
                commit.point_best(self.folder, best)  # before the previous best may be removed
                best = commit.read_best(self.folder)
            commit.remove_old(
                self.folder, section.keep_latest_k, section.keep_every_n_steps, progress.step, best
            )
        except (OSError, TransientError) as error:  # harmless: the new checkpoint is complete
            logger.warning(
                "checkpoint: cannot mark the best or remove old checkpoints in %s: %s",
                self.folder,
                error,
            )

    @contextmanager
    def _on_save_error(self, step: int) -> Generator[None]:
        """Handle a `CheckpointError` while the body saves `step`: raise it, or log a warning and
        continue, as `checkpoint.on_save_error` says.
        """
        try:
            yield
        except CheckpointError as error:
            self._saved_step = -1
            if self._section.on_save_error == "stop":
                raise
            text = (
                f"{error} Training continues, and the next save tries again "
                '(checkpoint.on_save_error = "continue").'
            )
            if dist.get_rank() == 0:
                logger.warning("%s", text)
            record_event("save failed", text, step)

    def final_folder(self, step: int) -> Path:
        """Return the checkpoint to hand out after training: the best one with
        `checkpoint.save_best`, else the checkpoint of `step`.
        """
        best = commit.read_best(self.folder) if self._section.save_best != "none" else None
        return step_folder(self.folder, step if best is None else best)

    def _best_step(self, progress: Progress) -> int | None:
        series = progress.results.get(self._section.save_best)
        return int(series["best_step"]) if series is not None and series["best_step"] > 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        # Only after errors that all ranks raise: after other errors a peer may have ended, and the
        # writer would wait for it.
        if isinstance(error, TitanliteError):
            try:
                self.wait()
            except TitanliteError as second:
                logger.error("%s", second)  # the first error is the one to raise

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises CheckpointError, on all ranks: the save failed, and `checkpoint.on_save_error` is
        "stop".
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            with self._on_save_error(self._saved_step):
                pending.result()

    def finish(self) -> None:
        """Wait for the last save.

        Raises CheckpointError: as `wait`. Raises TransientError, on all ranks: the last checkpoint
        does not exist, so the training since the previous one would be lost.
        """
        self.wait()
        if self._section.enable and self._saved_step < 0:
            raise TransientError(
                f"checkpoint: the last one could not be written to {self.folder}. Correct the "
                "cause above; the same command resumes from the previous checkpoint."
            )

    def agree(self, stop: bool) -> bool:
        """Return True on all ranks if `stop` is True on any rank. Call after each step.

        Raises CheckpointError, on all ranks at the same step: a save in the background failed, and
        `checkpoint.on_save_error` is "stop".
        """
        pending = self._pending
        failed = pending is not None and pending.done() and pending.exception() is not None
        flags = torch.tensor([stop, failed], dtype=torch.int32)
        dist.all_reduce(flags)
        stop, failed = map(bool, flags.tolist())
        if failed:
            self.wait()
        return stop
