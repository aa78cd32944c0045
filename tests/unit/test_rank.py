"""How a rank ends after an error that the others may not have."""

import pytest
import torch.distributed as dist
from files import read_lines

import titanlite.rank
from titanlite.base.agree import is_lost_peer
from titanlite.base.errors import TrainingError
from titanlite.base.events import _state, open_events


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """`failing(error)`: `main` raises it while groups of ranks are there; returns what main calls
    of torch.
    """
    destroyed = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    monkeypatch.setattr(titanlite.rank.protocol, "catch_signals", lambda: None)
    monkeypatch.setitem(_state, "path", tmp_path)
    open_events(tmp_path)

    def prepare(error):
        def load_config(argv):
            monkeypatch.setattr(dist, "is_initialized", lambda: True)
            monkeypatch.setattr(dist, "get_rank", lambda: 0)
            raise error

        monkeypatch.setattr(titanlite.rank, "load_config", load_config)
        return destroyed

    return prepare


def test_groups_are_left_alone_and_the_error_is_recorded(failing, tmp_path, capsys):
    destroyed = failing(TrainingError("memory: rank 0 ran out of memory. Lower something."))
    assert titanlite.rank.main([]) == 2
    assert destroyed == [], "other ranks may be in collectives"
    assert "error: memory: rank 0 ran out of memory. Lower something." in capsys.readouterr().err
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["text"]) == ("error", "memory: rank 0 ran out of memory")


def test_other_exceptions_are_recorded_too(failing, tmp_path):
    failing(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        titanlite.rank.main([])
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["text"]) == ("error", "ValueError: a bug")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:9, remote process exited or there was a network error"
            ),
            True,
        ),
        (
            dist.DistBackendError(
                "unhandled system error. Last error: shm_open: No space left on device (28)"
            ),
            False,
        ),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (
            RuntimeError(
                "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7"
            ),
            True,
        ),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_a_lost_peer_is_told_from_a_ranks_own_trouble(error, expected):
    assert is_lost_peer(error) is expected


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_cuda_reads_once_is_set_unless_the_user_has_set_it(monkeypatch, name):
    given = {name: "max_split_size_mb:64", "CUDA_DEVICE_MAX_CONNECTIONS": "1"} if name else {}
    expected = given or {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    monkeypatch.setattr("os.environ", environment := dict(given))
    titanlite.rank.set_gpu_defaults()
    assert environment == expected
