"""Which address and interface of this machine the other machines of a run can reach, and on which port.

gloo and torchrun take what the host name resolves to. On many machines that is a loopback address (Debian writes the
host name into /etc/hosts as 127.0.1.1; a container may have the name of its host), which no other machine can reach.
The route to a machine that all of them must reach anyway, that of the rendezvous, says better.
"""

import fcntl
import ipaddress
import random
import socket
import struct
from pathlib import Path

from titanlite.base.errors import ConfigError

_SIOCGIFADDR = 0x8915
# Nothing is sent there: connecting a datagram socket only asks the kernel for the route.
_SOMEWHERE = "8.8.8.8"
_ANY_PORT = 9
# Below, services have numbers of their own; above, Linux gives any to a connection, which may get it meanwhile.
PORTS = range(10_000, 32_768)
# Environment variable with the file where the ranks of one machine meet, each start in a new one.
STORE_FILE = "TITANLITE_STORE_FILE"
PORT_TAKEN = "failed to listen"  # in torch's error where a store cannot open its port


def find_local_address(host: str) -> str:
    """Return the address of this machine from which `host` is reached, and by which `host` reaches this machine.

    If `host` is this machine under a name, it is the address of the default route, or else of the first interface that
    has one; if it is a loopback address, all ranks are on this machine, and it is the result.

    Raises ConfigError: `host` cannot be resolved.
    """
    source = ""
    for address in resolve(host):
        source = _source_towards(address) or source
        if source and not _is_loopback(source):
            return source
    if host == "localhost" or _is_loopback(host):
        return source or host
    source = _source_towards(_SOMEWHERE)
    if source and not _is_loopback(source):
        return source
    others = [address for name, address in _addresses() if not _is_loopback(address)]
    return others[0] if others else "127.0.0.1"


def find_interface(host: str) -> str:
    """Return the name of the network interface with the address of `find_local_address`, for example `eth0`.

    Raises ConfigError: `host` cannot be resolved, or no interface has that address.
    """
    wanted = find_local_address(host)
    for name, address in _addresses():
        if address == wanted or (_is_loopback(address) and _is_loopback(wanted)):
            return name
    raise ConfigError(
        f"network: no interface has {wanted}, the address from which this machine reaches {host}. Set "
        "GLOO_SOCKET_IFNAME to the interface that the other machines can reach; `ip address` lists them."
    )


def find_free_port() -> int:
    """Return a port on which nobody listens, for a process that will in a few seconds."""
    draw = random.SystemRandom()  # not the generator that a run seeds: two runs would get the same ports
    while not is_free(port := draw.choice(PORTS)):
        pass
    return port


def is_free(port: int) -> bool:
    """Return True unless something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def is_this_machine(host: str) -> bool:
    """Return True if an address of `host` belongs to this machine. Raises ConfigError: `host` cannot be resolved."""
    for address in resolve(host):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def resolve(host: str) -> list[str]:
    """Return the addresses of `host`, IPv4 and IPv6, in the order of the resolver. Raises ConfigError: it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"network: the host '{host}' of the rendezvous is not known on {socket.gethostname()}: {error}. Use a name "
            "that every machine can resolve, or an address."
        ) from None
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _source_towards(address: str) -> str | None:
    """Return the address that packets to `address` would come from, or None without a route."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
    """Return (interface, address) of every interface that is up: its first IPv4 address, and its IPv6 ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # has none
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local: not enough to reach anybody
            found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found
