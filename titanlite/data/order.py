"""Which samples of the data order each step of a run takes, over resumes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Stretch:
    """Steps that follow each other and take equally many samples of one data order.

    Attributes:
        step: steps done before the first of them.
        samples: of the data order that lie before that step.
        global_batch_size: samples of each step.
        data: description of the data order, in words.
        offsets: of the sources of a mixture, see `MixtureDataset.offsets`; empty in files of older versions.
    """

    step: int
    samples: int
    global_batch_size: int
    data: str
    offsets: Mapping[str, int] = field(default_factory=dict)

    def samples_before(self, step: int) -> int:
        """Samples of the data order that lie before the step that follows `step` steps."""
        return self.samples + (step - self.step) * self.global_batch_size


def find_stretch(stretches: Sequence[Stretch], step: int) -> Stretch | None:
    """The one that the step after `step` steps belongs to; None if that lies before all of them."""
    return next((stretch for stretch in reversed(stretches) if stretch.step <= step), None)


def add_stretch(stretches: Sequence[Stretch], new: Stretch) -> list[Stretch]:
    """`stretches` up to `new` and then `new`, unless it only goes on as they do."""
    known = [stretch for stretch in stretches if stretch.step < new.step]
    if known and replace(known[-1], step=new.step, samples=known[-1].samples_before(new.step)) == new:
        return known
    return [*known, new]
