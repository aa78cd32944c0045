"""Which address the other machines of a run can reach, and how the launchers find each other."""

import argparse
import os
import socket

import pytest

from titanlite.base.errors import ConfigError
from titanlite.launch import rendezvous
from titanlite.launch.rendezvous import (
    find_free_port,
    find_interface,
    find_local_address,
    get_endpoint,
    is_this_machine,
    prepare_rendezvous,
)


def test_a_loopback_rendezvous_stays_on_this_machine():
    assert find_local_address("127.0.0.1") == "127.0.0.1"
    assert find_interface("127.0.0.1") == "lo"
    assert is_this_machine("localhost") and is_this_machine("127.0.0.1")


def test_an_unknown_host_is_named():
    with pytest.raises(
        ConfigError, match=r"the host 'no\.such\.host\.invalid' of the rendezvous is not known on "
    ):
        find_local_address("no.such.host.invalid")


# --- rendezvous


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))


def options(**changed):
    values = {
        "standalone": False,
        "nnodes": "2",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:29400",
    }
    values |= {"rdzv_conf": "", "rdzv_id": "run", "local_addr": None, "node_rank": 0}
    return argparse.Namespace(**values | {"master_addr": "node0", "master_port": 29500} | changed)


def listener():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("node0:1234", ("node0", 1234)),
        ("[fd00::2]:99", ("fd00::2", 99)),
        ("node0", ("node0", 29400)),
    ],
)
def test_endpoint(endpoint, expected):
    assert get_endpoint(options(rdzv_endpoint=endpoint)) == expected


def test_other_machines_do_not_host_the_store_and_are_known_by_their_address(monkeypatch, capsys):
    """torchrun takes a machine for the host if the names are equal, as those of two containers may
    be.
    """
    with listener() as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(rendezvous, "is_this_machine", lambda host: False)
        monkeypatch.setattr(rendezvous, "find_local_address", lambda host: "10.1.0.9")
        endpoint = f"127.0.0.1:{port}"
        ready = prepare_rendezvous(
            options(rdzv_endpoint=endpoint, rdzv_conf="join_timeout=9", nnodes="1:4")
        )
    assert (ready.rdzv_conf, ready.local_addr) == ("join_timeout=9,is_host=0", "10.1.0.9")
    assert f"waiting for 1 to 4 machines at {endpoint}" in capsys.readouterr().err


def test_the_first_launcher_on_the_machine_of_the_endpoint_hosts_the_store():
    with listener() as server:
        port = server.getsockname()[1]
        assert (
            prepare_rendezvous(options(rdzv_endpoint=f"127.0.0.1:{port}")).rdzv_conf == "is_host=0"
        )
    assert prepare_rendezvous(options(rdzv_endpoint=f"127.0.0.1:{port}")).rdzv_conf == "is_host=1"
    assert prepare_rendezvous(options(rdzv_endpoint=f"localhost:{port}")).rdzv_conf == ""
    assert prepare_rendezvous(options(rdzv_conf="is_host=0")).rdzv_conf == "is_host=0", (
        "the user knows better"
    )


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_rendezvous_that_nobody_opens_is_one_error(backend, monkeypatch):
    with listener() as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(rendezvous, "is_this_machine", lambda host: False)
    monkeypatch.setattr(rendezvous, "_PAUSE_S", 0.01)
    given = options(
        rdzv_backend=backend,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_conf="join_timeout=0",
        node_rank=1,
        master_addr="127.0.0.1",
        master_port=port,
    )
    monkeypatch.setattr(rendezvous, "_JOIN_TIMEOUT_S", 0)
    with pytest.raises(
        ConfigError,
        match=rf"rendezvous at 127.0.0.1:{port}: not reached within 0 s: Connection refused",
    ):
        prepare_rendezvous(given)


def test_a_port_on_which_somebody_listens_is_not_free(monkeypatch):
    with socket.create_server(("", 0)) as taken, socket.create_server(("", 0)) as other:
        ports = [server.getsockname()[1] for server in (taken, other)]
        other.close()
        monkeypatch.setattr(rendezvous, "PORTS", ports)
        assert {find_free_port() for _ in range(20)} == {ports[1]}
