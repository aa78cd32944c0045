"""Steps whose loss or gradient is not finite: never applied, counted on the device, and read at log steps."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NonFiniteSteps:
    """What was not finite, on the host.

    Attributes:
        first_new: first such step since the last look.
        first: first step of the run of such steps up to the latest; -1 if the latest was finite.
        in_a_row: length of that run.
        total: such steps since the process started.
        micro_batches: numbers of the micro-batches whose loss on this rank was not finite in step `first_new`.
        fatal: as many in a row as may be; nothing was applied since `first`.
    """

    first_new: int
    first: int
    in_a_row: int
    total: int
    micro_batches: tuple[int, ...]
    fatal: bool


class FiniteGuard:
    """Decides on the device which steps are applied; the host waits for it only in `look`.

    After `limit` steps in a row that are not finite no step is applied any more, so that weights, optimizer states and
    biases are those before the first of them when the host finds out. All ranks feed it the same reduced values.

    Args:
        device: of loss and gradient norm.
        limit: most steps in a row; 1 stops at the first.
    """

    def __init__(self, device: torch.device, limit: int = 1) -> None:
        self._limit = limit
        # first_new, first, in_a_row, total
        self._state = torch.tensor([-1, -1, 0, 0], dtype=torch.int64, device=device)
        self._flags: torch.Tensor | None = None  # losses_finite of step first_new
        self._seen = 0

    def state(self) -> list[torch.Tensor]:
        return [self._state] if self._flags is None else [self._state, self._flags]

    @torch.no_grad()
    def admit(self, step: int, finite: torch.Tensor, losses_finite: torch.Tensor | None = None) -> torch.Tensor:
        """Return True, as a bool scalar on the device, if step `step` is to be applied.

        Args:
            step: about to be applied, counted from 1.
            finite: bool scalar: its loss and gradient norm are finite, over all ranks.
            losses_finite: bool (micro-batches,): the losses of this rank's micro-batches are.
        """
        first_new, first, in_a_row, total = self._state.unbind()
        finite = finite.to(self._state.device)
        frozen = in_a_row >= self._limit
        bad = ~finite & ~frozen
        if losses_finite is not None:
            flags = torch.ones_like(losses_finite) if self._flags is None else self._flags
            self._flags = torch.where(bad & (first_new < 0), losses_finite, flags)
        now = torch.full_like(first, step)
        self._state = torch.stack(
            [
                torch.where(bad & (first_new < 0), now, first_new),
                torch.where(frozen, first, torch.where(bad, torch.where(in_a_row == 0, now, first), -1)),
                torch.where(frozen, in_a_row, torch.where(bad, in_a_row + 1, 0)),
                total + bad,
            ]
        )
        return finite & ~frozen

    @property
    def total(self) -> int:
        """Steps that were not finite, up to the last look."""
        return self._seen

    def look(self) -> NonFiniteSteps | None:
        """Return what was not finite since the last look, or None. Synchronizes; only `micro_batches` vary by rank."""
        first_new, first, in_a_row, total = self._state.tolist()
        if total == self._seen:
            return None
        self._seen = total
        flags = [] if self._flags is None else self._flags.tolist()
        micro_batches = tuple(i for i, is_finite in enumerate(flags) if not is_finite)
        self._state[0] = -1
        self._flags = None
        return NonFiniteSteps(first_new, first, in_a_row, total, micro_batches, in_a_row >= self._limit)
