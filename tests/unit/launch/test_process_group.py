"""When the ranks cannot be connected: what the user reads, and whether a new start may help."""

import socket

import pytest
import torch
import torch.distributed as dist

from titanlite.base.errors import NEVER_RESTARTED, ConfigError, TransientError
from titanlite.launch import process_group

UNREACHED = (
    "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection "
    "refused\nframe #0"
)


@pytest.fixture(autouse=True)
def _rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")


def test_ranks_that_cannot_be_connected_may_be_at_the_next_start():
    error = process_group._explain(RuntimeError(UNREACHED))
    assert isinstance(error, TransientError) and error.exit_code not in NEVER_RESTARTED
    assert "interface eth7 and port 29500" in str(error) and "frame" not in str(error)


def test_a_port_that_is_taken_may_be_free_at_the_next_start(monkeypatch):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(dist.DistNetworkError) as caught:
            dist.TCPStore("127.0.0.1", port, is_master=True)
    error = process_group._explain(caught.value)
    assert isinstance(error, TransientError) and error.exit_code not in NEVER_RESTARTED
    assert f" and port {port}: " in str(error) and "MASTER_PORT to a free port." in str(error)


@pytest.mark.parametrize(
    ("world_size", "on_this_machine", "expected"),
    [("4", "4", "lo"), ("1", None, "lo"), (None, None, "lo"), ("4", None, None)],
)
def test_ranks_of_one_machine_listen_on_the_loopback_interface(
    monkeypatch, world_size, on_this_machine, expected
):
    """Also those of torchrun, and one process alone; not where nobody knows how many ranks are
    here.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": on_this_machine}
    for before, after in ((None, expected), ("lo", expected), ("eth7", "eth7")):
        variables = {name: value for name, value in environment.items() if value is not None}
        variables |= dict.fromkeys(names, before) if before else {}
        monkeypatch.setattr(process_group.os, "environ", variables)
        process_group._choose_interfaces()
        assert [variables.get(name) for name in names] == [after, after]


def test_gpus_that_torch_cannot_use_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TITANLITE_GPUS", "8")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ConfigError, match=r"nvidia-smi lists 8 .* it was built without CUDA\. Install"
    ):
        process_group.init_distributed(60)

    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        ConfigError, match=r"driver on your system is too old \(found version 11040\)\. Install"
    ):
        process_group.init_distributed(60)
