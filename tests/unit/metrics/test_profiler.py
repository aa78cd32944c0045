import pytest
import torch
import torch.distributed as dist
from files import read_json

from titanlite.config.schema import JobConfig
from titanlite.metrics import profiling

# torch's, of a trace of every step.
pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")


@pytest.fixture(autouse=True)
def one_of_two_ranks(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def train(folder, freq, first, last, fail_in=None):
    """The steps `first` to `last` of a run, as one process trains them, each with one matrix
    product.
    """
    job = JobConfig()
    job.profiling.enable_profiling, job.profiling.profile_freq = True, freq
    with profiling(job.profiling, folder) as end_step:
        for step in range(first, last + 1):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            if step == fail_in:
                raise KeyError
            end_step(step)


def traces(folder):
    return {
        int(path.parent.name.removeprefix("step-")): path
        for path in folder.glob("profile_traces/*/rank-0.json")
    }


def num_products(path):
    return sum(event.get("name") == "aten::mm" for event in read_json(path)["traceEvents"])


def test_traces_are_named_by_the_step_of_the_run(tmp_path):
    train(tmp_path, 3, 1, 7)
    assert set(traces(tmp_path)) == {3, 6}
    before = traces(tmp_path)[3].read_bytes()
    train(tmp_path, 3, 101, 104)
    assert set(traces(tmp_path)) == {3, 6, 103}
    assert traces(tmp_path)[3].read_bytes() == before
    assert [num_products(path) for path in traces(tmp_path).values()] == [1, 1, 1]


def test_what_follows_the_last_step_is_no_trace(tmp_path):
    """The profiler has begun to record a step by then, and would replace the trace of the last
    one.
    """
    train(tmp_path, 1, 1, 2)
    assert {step: num_products(path) for step, path in traces(tmp_path).items()} == {1: 1, 2: 1}


def test_a_step_that_fails_leaves_no_trace(tmp_path):
    with pytest.raises(KeyError):
        train(tmp_path, 1, 1, 3, fail_in=2)
    assert set(traces(tmp_path)) == {1}
