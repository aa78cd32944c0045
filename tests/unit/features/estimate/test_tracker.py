"""The recorder against small cases computed by hand, and against torch's own counter of FLOPs."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from titanlite.distributed import collectives
from titanlite.features.estimate.operators import Work, moved_by
from titanlite.features.estimate.tracker import Segment, StepRecorder

KIB = 1024


def total(recorder, segment):
    return sum(recorder.peaks[segment].values())


def by_phase(recorder):
    found = {}
    for kind, work in recorder.work.items():
        found[kind.phase] = found.get(kind.phase, Work()) + work
    return found


def test_live_bytes_of_views_and_results_in_place():
    x = torch.zeros(KIB, dtype=torch.uint8)
    with StepRecorder([x]) as recorder:
        recorder.begin(0, "forward")
        y = x + 1  # 1 KiB
        view = y[10:20]
        y += 1
        z = y * 2  # 2 KiB
        del y
        recorder.begin(0, "head")
        view += 1  # keeps y alive
        del view
        recorder.begin(0, "backward")
        z += 1  # z only
        del z
        recorder.begin(-1, "optimizer")
        x += 1
    peaks = [total(recorder, Segment(0, phase)) for phase in ("forward", "head", "backward")]
    assert peaks == [2 * KIB, 2 * KIB, KIB]
    assert total(recorder, Segment(-1, "optimizer", turn=1)) == 0


@pytest.mark.parametrize("fake", [False, True])
def test_a_chain_keeps_what_its_backward_needs(fake):
    """relu(x @ a) @ b: kept are the relu (input of the second product); the first product is
    overwritten.
    """
    size, nbytes = 16, 16 * 16 * 4
    mode = FakeTensorMode() if fake else torch.no_grad()
    with mode:
        x, a, b = (torch.zeros(size, size) for _ in range(3))
    with mode if fake else torch.enable_grad():
        a.requires_grad_(), b.requires_grad_()
        with StepRecorder([x, a, b]) as recorder:
            recorder.begin(0, "forward")
            hidden = F.relu(x @ a)  # the product lives until relu returns
            recorder.begin(0, "head")
            loss = (hidden @ b).sum()
            del hidden
            recorder.begin(0, "backward")
            loss.backward()
    assert total(recorder, Segment(0, "forward")) == 2 * nbytes
    # the relu, the second product, and its sum
    assert total(recorder, Segment(0, "head")) == 2 * nbytes + 4
    flops = 2 * size**3
    found = by_phase(recorder)
    assert {kind.call.rate for kind in recorder.work if kind.call.flops} == {"float32"}
    assert {phase: work.flops for phase, work in found.items()} == {
        "forward": flops,
        "head": flops,
        "backward": 3 * flops,  # no gradient of x
    }
    # Two operands and a result of the product; operand and result of relu, which launches a kernel,
    # too.
    assert (found["forward"].nbytes, found["forward"].launches) == (5 * nbytes, 2)
    # the product, and the sum of it
    assert (found["head"].nbytes, found["head"].launches) == (4 * nbytes + 4, 2)


def test_views_move_nothing_and_steps_in_place_read_and_write():
    x, index = torch.zeros(64, 8), torch.zeros(2, dtype=torch.int64)
    with StepRecorder([x]) as recorder:
        for phase in ("view", "in place", "picked", "made"):
            recorder.begin(0, phase)
            _ = {
                "view": lambda: x.view(8, 64).t()[1:],
                "in place": lambda: x.add_(1),
                "picked": lambda: x.index_select(0, index),
                "made": lambda: torch.empty(64),
            }[phase]()
    found = {phase: (work.nbytes, work.launches) for phase, work in by_phase(recorder).items()}
    assert found.keys() == {"in place", "picked"}
    assert found["in place"] == (2 * x.nbytes, 1)
    assert found["picked"] == (2 * 2 * 8 * 4, 1)


def test_every_collective_of_titanlite_is_counted():
    x, splits = torch.zeros(4), [2, 2]
    arguments = {
        "all_reduce": (x,),
        "all_gather": (x, 0),
        "reduce_scatter": (x, 0),
        "gather_parts": (x, 0),
        "all_to_all": (x, splits, splits),
    }
    names = (name for name in vars(collectives) if not name.startswith("_"))
    own = {name for name in names if hasattr(torch.ops.titanlite, name)}
    assert own == arguments.keys()
    for name, args in arguments.items():
        # The result of a gather is its larger side.
        moved = moved_by(getattr(torch.ops.titanlite, name).default, (*args, "group"), x.repeat(2))
        is_gather = name in ("all_gather", "gather_parts")
        kind = "all_gather" if is_gather else name
        assert moved == (kind, "group", x.nbytes * (1 + is_gather))


def test_a_collective_of_an_unknown_kind_is_not_left_out():
    c10d = torch.ops.c10d
    lists = torch.zeros(2), [torch.zeros(1)]
    for unknown in (c10d.scatter_.default, c10d.reduce_scatter_.default):
        with pytest.raises(NotImplementedError, match=r"c10d\.\w+\.default is not in"):
            moved_by(unknown, lists, None)
    assert moved_by(torch.ops.titanlite.gather_sum.default, (), None) is None
