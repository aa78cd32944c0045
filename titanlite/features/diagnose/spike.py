"""Loss spikes: noticed at log steps, with the restart that leaves the batches of the spike out.

The remedy is that of PaLM's authors (arXiv:2204.02311, section 5.1): restart from before the spike, past the batches
around it.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from titanlite.base.log import logger
from titanlite.checkpoint import find_complete_before
from titanlite.config.schema import SpikeSection
from titanlite.metrics import record_event

_MIN_HISTORY = 8
# Of a normal distribution, the standard deviation over the median absolute deviation.
_MAD_TO_STD = 1.4826
# A loss that hardly moves has a deviation near 0; changes below this share of it are no spikes.
_SMALLEST_SHARE = 1e-3


class Spike(NamedTuple):
    """A loss that stands out; `score` is its deviation from the median over the robust standard deviation."""

    step: int
    loss: float
    median: float
    score: float


class SpikeDetector:
    """Comparison of losses to the median of the last `spike.window` ones, in units of their median absolute deviation.

    Neither median nor deviation is moved by single large losses, as a mean would be. Nothing is a spike before half a
    window (at least 8 losses) is known; a resumed run fills its window again. `folder` has the run's checkpoints.
    """

    def __init__(self, section: SpikeSection, folder: Path) -> None:
        self._folder = folder
        self._enabled, self._threshold = section.enable, section.threshold
        self._losses: deque[float] = deque(maxlen=section.window)
        self._needed = max(_MIN_HISTORY, section.window // 2)

    def watch(self, last_step: int, losses: Sequence[float], samples: int) -> None:
        """Take the losses of the steps up to `last_step`; warn on rank 0 of a spike, and say how to go back before it.

        `samples` of the data order lie before the next step: those are what a restart leaves out.
        """
        spike = self.add(last_step, losses)
        if spike is None or dist.get_rank() != 0:
            return
        text = (
            f"the loss of step {spike.step} is {spike.loss:.4f}, {spike.score:.1f} robust standard deviations above "
            f"the median of {spike.median:.4f}; training goes on."
        )
        target = find_complete_before(self._folder, spike.step)
        if target is None:
            text += " There is no checkpoint of before to go back to."
        else:
            text += (
                f" To leave out the data of steps {target + 1} to {last_step}: stop this run, move the checkpoints "
                f"after step-{target} out of {self._folder}, and start the same command with "
                f"--data.skip_to_sample={samples}"
            )
        logger.warning("spike: %s", text)
        record_event("spike", text, last_step)

    def add(self, last_step: int, losses: Sequence[float]) -> Spike | None:
        """Take the losses of the steps up to `last_step`; return the first spike among them, or None.

        Losses that are not finite are passed over: those steps were not applied.
        """
        if not self._enabled:
            return None
        for step, loss in enumerate(losses, last_step - len(losses) + 1):
            if not math.isfinite(loss):
                continue
            if len(self._losses) >= self._needed:
                median = statistics.median(self._losses)
                deviation = statistics.median(abs(known - median) for known in self._losses)
                score = (loss - median) / max(_MAD_TO_STD * deviation, _SMALLEST_SHARE * abs(median), 1e-12)
                if score > self._threshold:
                    return Spike(step, loss, median, score)
            self._losses.append(loss)
        return None
