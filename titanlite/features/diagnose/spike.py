"""Loss spikes: noticed at log steps, and undone by going back to a checkpoint and past the batches of the spike.

What PaLM's authors did by hand (arXiv:2204.02311, section 5.1): restart from before the spike and leave out the batches
around it.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from titanlite.base.agree import on_first_rank
from titanlite.base.log import logger
from titanlite.checkpoint import Rewind, find_complete_before, save_rewinds, set_aside_from
from titanlite.config.schema import SpikeSection
from titanlite.metrics.events import record_event

_MIN_HISTORY = 8
# Of a normal distribution, the standard deviation over the median absolute deviation.
_MAD_TO_STD = 1.4826
# A loss that hardly moves has a deviation near 0; changes below this share of it are no spikes.
_SMALLEST_SHARE = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss that stands out.

    Attributes:
        step: whose loss it is.
        loss: of that step.
        median: of the steps before it.
        score: deviation from the median over the robust standard deviation.
    """

    step: int
    loss: float
    median: float
    score: float


class SpikeDetector:
    """Compares each loss with the median of the last `spike.window` ones, in units of their median absolute deviation.

    Neither median nor deviation is moved by single large losses, as a mean would be. Nothing is a spike before half a
    window (at least 8 losses) is known; a resumed run fills its window again.
    """

    def __init__(self, section: SpikeSection) -> None:
        self._enabled, self._threshold = section.enable, section.threshold
        self._losses: deque[float] = deque(maxlen=section.window)
        self._needed = max(_MIN_HISTORY, section.window // 2)

    def add(self, last_step: int, losses: Sequence[float]) -> Spike | None:
        """Take the losses of the steps up to `last_step`; the first spike among them, or None.

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


def find_rewind(
    section: SpikeSection, spike: Spike, done: Sequence[Rewind], folder: Path, step: int, samples: int
) -> Rewind | None:
    """What to do about `spike`: a `Rewind`, with the checkpoints since the spike set aside; None to train on.

    The rewind is on the disk then: a run that is killed before its next save resumes with it.

    Args:
        section: `spike.max_rewinds` counts those of the whole run, resumed or not.
        spike: that was found after `step`.
        done: rewinds so far.
        folder: of the run's checkpoints.
        step: steps done; the batches from the spike's up to here are left out.
        samples: of the data order that were trained on up to `step`.

    Collectives: a broadcast; every rank must call.
    """

    def decide() -> tuple[Rewind | None, str]:
        what = (
            f"the loss of step {spike.step} is {spike.loss:.4f}, {spike.score:.1f} robust standard deviations above "
            f"the median of {spike.median:.4f}"
        )
        if len(done) >= section.max_rewinds:
            return None, f"{what}; spike.max_rewinds ({section.max_rewinds}) is reached, so training goes on."
        target = find_complete_before(folder, spike.step)
        if target is None:
            return None, f"{what}; there is no checkpoint of before to go back to, so training goes on."
        set_aside_from(folder, spike.step, "rewound")
        text = (
            f"{what}. Going back to step {target}; the data of steps {spike.step} to {step} is left out (rewind "
            f"{len(done) + 1} of at most {section.max_rewinds})."
        )
        rewind = Rewind(spike_step=spike.step, found_step=step, to_step=target, samples=samples)
        save_rewinds(folder, [*done, rewind])  # last: killed before it, the run meets the spike again
        return rewind, text

    decision, text = on_first_rank(decide)
    if dist.get_rank() == 0:
        logger.warning("spike: %s", text)
    record_event("spike" if decision is None else "rewind", text, step)
    return decision
