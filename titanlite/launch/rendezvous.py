"""Rendezvous of the machines of a run: addresses and ports, torchrun's options, and its errors in
one line.

On one machine no port is open: see `LocalRendezvous`. Several machines meet at a port without
authentication.

gloo and torchrun use the address to which the host name resolves. On many machines that is a
loopback address, which no other machine can reach (Debian writes the host name into /etc/hosts as
127.0.1.1; a container may have the name of its host). A better source is the route to the
rendezvous, a machine that all of them must reach anyway.
"""

import argparse
import ipaddress
import os
import random
import socket
import time
import uuid
from pathlib import Path

import psutil
from torch.distributed import DistError, HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from titanlite.base.errors import NOTICE_FOLDER, RENDEZVOUS, ConfigError
from titanlite.base.text import first_line
from titanlite.launch.protocol import say

# No packet is sent there: connecting a datagram socket only asks the kernel for the route.
_SOMEWHERE = "8.8.8.8"
_ANY_PORT = 9
# Lower ports belong to services; Linux assigns higher ones to any connection, possibly before the
# port is opened.
PORTS = range(10_000, 32_768)
# Environment variable: the file in which the ranks of one machine meet, a new one for each start.
STORE_FILE = "TITANLITE_STORE_FILE"
PORT_TAKEN = "failed to listen"  # in torch's error if a store cannot open its port


def find_local_address(host: str) -> str:
    """Return the address of this machine from which `host` is reached, and at which `host` reaches
    this machine.

    If `host` is a name of this machine, the result is the address of the default route, or else of
    the first interface that has one. If `host` is a loopback address, all ranks are on this
    machine, and the result is that address.

    Raises ConfigError: `host` cannot be resolved.
    """
    source = ""
    for address in resolve(host):
        source = _source_towards(address) or source
        if source and not _is_loopback(source):
            return source
    if host == "localhost" or _is_loopback(host):
        return source or host
    found = [_source_towards(_SOMEWHERE), *(address for _, address in _addresses())]
    return next(
        (address for address in found if address and not _is_loopback(address)), "127.0.0.1"
    )


def find_interface(host: str) -> str:
    """Return the name of the network interface with the address of `find_local_address`, for
    example `eth0`.

    Raises ConfigError: `host` cannot be resolved, or no interface has that address.
    """
    wanted = find_local_address(host)
    for name, address in _addresses():
        if address == wanted or (_is_loopback(address) and _is_loopback(wanted)):
            return name
    raise ConfigError(
        f"network: no interface has {wanted}, the address from which this machine reaches {host}. "
        "Set GLOO_SOCKET_IFNAME to the interface that the other machines can reach; `ip address` "
        "lists them."
    )


def find_free_port() -> int:
    """Return a free port, for a process that opens it within seconds."""
    # Do not use the generator that a run seeds: two runs would get the same ports.
    draw = random.SystemRandom()
    while not is_free(port := draw.choice(PORTS)):
        pass
    return port


def is_free(port: int) -> bool:
    """Return True unless a process listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def is_this_machine(host: str) -> bool:
    """Return True if an address of `host` belongs to this machine.

    Raises ConfigError: `host` cannot be resolved.
    """
    # The route to one of the machine's own addresses begins at that address.
    return any(
        _is_loopback(address) or _source_towards(address) == address for address in resolve(host)
    )


def resolve(host: str) -> list[str]:
    """Return the addresses of `host`, IPv4 and IPv6, in the order of the resolver.

    Raises ConfigError: `host` cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"network: the host '{host}' of the rendezvous is not known on {socket.gethostname()}: "
            f"{error}. Use a name that every machine can resolve, or an address."
        ) from None
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _source_towards(address: str) -> str | None:
    """Return the source address of packets to `address`, or None without a route."""
    with socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of this machine, IPv4 and IPv6."""
    found = []
    for name, entries in psutil.net_if_addrs().items():
        # An address with % is link-local: without its interface it reaches no other machine.
        found += [
            (name, e.address)
            for e in entries
            if e.family != psutil.AF_LINK and "%" not in e.address
        ]
    return found


DEFAULT_PORT = 29400
_JOIN_TIMEOUT_S = 600  # torchrun's default
_PAUSE_S = 0.5

_LOCAL = "titanlite-local"

RENDEZVOUS_ERRORS = (RendezvousError, DistError, ConfigError)


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one machine: the launcher's own memory for torchrun, and a file for the
    ranks.

    torchrun's own rendezvous opens a port on all interfaces, and unpickles data from anybody who
    can connect; the ranks' store does the same. Each start of the ranks has a new file, because the
    old one has addresses of ended ranks.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._starts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once; the ranks that start next inherit the variable with their file's name."""
        self._starts += 1
        os.environ[STORE_FILE] = str(Path(os.environ[NOTICE_FOLDER], f"store-{self._starts}"))
        # Nothing listens at this port; users' programs may expect the variables.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", find_free_port()))

    def get_backend(self) -> str:
        return _LOCAL

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def prepare_rendezvous(options: argparse.Namespace) -> argparse.Namespace:
    """Complete torchrun's `options` in place, and wait until the rendezvous of several machines can
    be reached.

    On one machine no port is opened. Signals are handled during the wait.

    Raises ConfigError: the host of the rendezvous cannot be resolved, or is not reached within the
    join timeout.
    """
    if options.standalone or options.nnodes in ("1", "1:1"):  # always a single machine
        rendezvous_handler_registry.register(_LOCAL, LocalRendezvous)
        options.standalone = False
        options.rdzv_backend = _LOCAL
        options.rdzv_id = str(uuid.uuid4())
        # Not used; without an endpoint torchrun warns about its default master_addr.
        options.rdzv_endpoint = "localhost"
        return options
    host, port = get_endpoint(options)
    elastic = options.rdzv_backend == "c10d"
    here = options.node_rank == 0 if not elastic else is_this_machine(host)
    if elastic:
        # Otherwise machines would be known by names that other machines may not resolve.
        options.local_addr = options.local_addr or find_local_address(host)
        # torchrun compares names to find the host of the rendezvous, but machines may share a name,
        # or have addresses that their name does not resolve to.
        if "is_host=" not in options.rdzv_conf and not (
            here and host in ("localhost", socket.gethostname())
        ):
            # if several launchers run on one machine, the first has the store
            is_host = int(here and is_free(port))
            options.rdzv_conf = ",".join(filter(None, [options.rdzv_conf, f"is_host={is_host}"]))
        name = f", rendezvous '{options.rdzv_id}'"
        os.environ[RENDEZVOUS] = f"{options.rdzv_endpoint}/{options.rdzv_id}"
    else:
        name = ""
    say(f"waiting for {options.nnodes.replace(':', ' to ')} machines at {host}:{port}{name} ...")
    if not here:
        _wait_for(host, port, _get_join_timeout(options))
    return options


def get_endpoint(options: argparse.Namespace) -> tuple[str, int]:
    """Return (host, port) of the rendezvous."""
    if options.rdzv_backend != "c10d":
        return options.master_addr, options.master_port
    host, colon, port = options.rdzv_endpoint.rpartition(":")
    if not colon or not port.isdigit():
        return options.rdzv_endpoint, DEFAULT_PORT
    return host.strip("[]"), int(port)


def describe_failure(error: Exception, options: argparse.Namespace) -> str:
    """Describe an error, one of `RENDEZVOUS_ERRORS`, in a sentence."""
    if isinstance(error, ConfigError):
        return str(error)
    host, port = get_endpoint(options)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    why = first_line(cause)
    if isinstance(error, RendezvousClosedError):
        why = f"the run '{options.rdzv_id}' has ended on another machine; the output there says why"
    elif isinstance(error, RendezvousTimeoutError):
        why = f"{options.nnodes} machines did not meet within {_get_join_timeout(options)} s"
    elif PORT_TAKEN in why:
        why = "another process on this machine has the port"
    return (
        f"rendezvous at {host}:{port}: {why}. Start the same command on all machines, with the "
        "same RDZV_ID, NNODES and a free port in RDZV_ENDPOINT (or MASTER_PORT)."
    )


def _get_join_timeout(options: argparse.Namespace) -> int:
    settings = dict(item.partition("=")[::2] for item in options.rdzv_conf.split(",") if item)
    return int(settings.get("join_timeout") or settings.get("timeout") or _JOIN_TIMEOUT_S)


def _wait_for(host: str, port: int, timeout_s: float) -> None:
    """Return once a process listens there. torch would wait in C, where signals are not handled."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"rendezvous at {host}:{port}: not reached within {timeout_s:.0f} s: "
                    f"{error.strerror or error}. Start the same command on that machine, and let "
                    "it accept connections to that port."
                ) from None
        time.sleep(_PAUSE_S)
