"""Exchange of host tensors between the ranks of one machine, through memory that all of them map.

gloo sends over TCP to a neighbour too: every byte is copied into the kernel and out of it, by threads that wake each
other for every piece. Here it is written once by its sender and read once by each receiver.

Each rank owns two regions, and takes them in turns. In a round a rank

1. writes its data for the others into its region,
2. notifies every peer by a message over a Unix socket, and waits for theirs,
3. reads from their regions.

Reads are not confirmed: a rank that announces round k + 1 has finished round k, and only round k + 2 overwrites the
region of round k. Larger tensors take several rounds. Pages are allocated by the round that first writes them, and
freed when the processes end, however they do.

A message carries the round's number and the collective, so that mismatched collectives are an error at once.
"""

import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlite.base.log import logger
from titanlite.base.process import read_variable
from titanlite.distributed.collectives import DEFAULT_TIMEOUT_S, sum_pieces

_REGION_BYTES = 4 << 20
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool),
)
_SETUP_TIMEOUT_S = 60.0  # ranks that have just met in a collective


class _Message(NamedTuple):
    """Message of a rank to one peer in the round `number`.

    Attributes:
        kind, dtype: indices in `_KINDS` and `_DTYPES`.
        start, length: of an all-to-all, the part of the sender's data for this peer, in elements; of other
            collectives, 0 and the elements of the whole tensor.
        more: true if the sender has data left after this round.
    """

    number: int
    kind: int
    dtype: int
    start: int
    length: int
    more: bool


_FORMAT = struct.Struct("<QBBQQ?")


class SharedMemory:
    """A `Transport`: the collectives of a group of ranks that share a machine. Made by `open_shared_memory`.

    All tensors are on the host, contiguous, and of a dtype in `_DTYPES`. Every rank of the group must call, in one
    order.

    Args:
        ranks: global rank of every member, for messages.
        rank: this rank's place among them.
        peers: a connected socket to every other member, by its place.
        memory: the regions of all members, mapped; 2 * len(ranks) * region_bytes, a multiple of 16.

    Raises:
        torch.distributed.DistNetworkError: (from every collective) a peer has ended, is in another collective, or does
            not come within the time limit. The tensors' contents are undefined then.
        ValueError: the splits of an all-to-all are not those of its tensors.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, peers: dict[int, socket.socket], memory: mmap.mmap, region_bytes: int
    ) -> None:
        self._ranks, self._rank, self._peers, self._region_bytes = list(ranks), rank, peers, region_bytes
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).view(2, len(ranks), region_bytes)
        self._round = 0

    def close(self) -> None:
        """Close the connections. Peers that still wait for this rank get an error."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # also where a forked child of this rank has the socket open
            peer.close()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write the members' equally large `x` to `out`, one after another."""
        pieces = out.view(len(self._ranks), -1)
        for place, regions in self._exchange("all_gather", x):
            pieces[:, place].copy_(regions)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write this rank's piece of the sum of the members' `x` to `out`; see `sum_pieces`."""
        pieces, mine = x.view(len(self._ranks), -1), out.view(-1)
        width = self._region_bytes // x.itemsize // len(self._ranks)
        for start in range(0, mine.numel(), width):
            regions, part = self._next_regions(x.dtype), pieces[:, start : start + width]
            mine_in = slice(self._rank * part.shape[1], (self._rank + 1) * part.shape[1])
            regions[self._rank, : part.numel()].view_as(part).copy_(part)
            self._synchronize("reduce_scatter", x)
            sum_pieces(mine[start : start + width], regions[:, mine_in])

    def all_reduce(self, x: torch.Tensor) -> None:
        """Write the sum of the members' `x` to `x`; see `sum_pieces`. For few numbers: every member adds up all."""
        for place, regions in self._exchange("all_reduce", x):
            sum_pieces(x.view(-1)[place], regions)

    def _exchange(self, kind: str, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each part of all members' `x`, (members, elements), and its place in the flat `x`."""
        mine, width = x.view(-1), self._region_bytes // x.itemsize
        for start in range(0, mine.numel(), width):
            regions, part = self._next_regions(x.dtype), mine[start : start + width]
            regions[self._rank, : part.numel()].copy_(part)
            self._synchronize(kind, x)
            yield slice(start, start + part.numel()), regions[:, : part.numel()]

    def all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        """Send `input_splits[r]` rows of `x` to each member r; write the `output_splits[r]` from each to `out`."""
        sent, received, width = x.view(-1), out.view(-1), math.prod(x.shape[1:])
        send, receive = _segments(input_splits, width), _segments(output_splits, width)
        if (send[-1][1], receive[-1][1]) != (sent.numel(), received.numel()):
            raise ValueError(
                f"all_to_all: {input_splits} of {len(x)} rows to send, {output_splits} of {len(out)} to receive."
            )
        received[slice(*receive[self._rank])].copy_(sent[slice(*send[self._rank])])
        parts = {peer: (start, end - start) for peer, (start, end) in enumerate(send)}
        done, more = 0, True  # all ranks have the same `done`: elements that each has written
        while more:
            regions = self._next_regions(x.dtype)
            upto = done + regions.shape[1]
            part = sent[done:upto]
            regions[self._rank, : part.numel()].copy_(part)
            more = upto < sent.numel()
            for peer, message in self._synchronize("all_to_all", x, parts, more=more).items():
                target, expected = receive[peer][0], receive[peer][1] - receive[peer][0]
                if message.length != expected:
                    what = "more" if message.length > expected else "fewer"
                    raise self._failed(peer, f"sent {what} rows than the {output_splits[peer]} that were announced")
                first, last = max(message.start, done), min(message.start + message.length, upto)
                if first < last:
                    at = target - message.start
                    received[at + first : at + last].copy_(regions[peer, first - done : last - done])
                more |= message.more
            done = upto

    def _next_regions(self, dtype: torch.dtype) -> torch.Tensor:
        self._round += 1
        return self._bytes[self._round % 2].view(dtype)

    def _synchronize(
        self, kind: str, x: torch.Tensor, parts: dict[int, tuple[int, int]] | None = None, *, more: bool = False
    ) -> dict[int, _Message]:
        """Tell every peer that this rank has written, wait until all have, and return their messages."""
        mine = _Message(self._round, _KINDS.index(kind), _DTYPES.index(x.dtype), 0, x.numel(), more)
        messages = {}
        for peer, connection in self._peers.items():
            message = mine if parts is None else mine._replace(start=parts[peer][0], length=parts[peer][1])
            # Peers that have ended are found below; the others must not wait for this rank, but fail alike.
            with suppress(OSError):
                connection.send(_FORMAT.pack(*message))
        for peer, connection in self._peers.items():
            try:
                data = connection.recv(_FORMAT.size)
            except BlockingIOError:
                raise self._failed(peer, f"did not come to {kind} within the time limit of collectives") from None
            except OSError as error:
                raise self._failed(peer, f"has hung up ({error.strerror})") from None
            if not data:
                raise self._failed(peer, f"ended, failed, or left the group, before {kind}")
            messages[peer] = theirs = _Message(*_FORMAT.unpack(data))
            if theirs[:3] != mine[:3] or (parts is None and theirs.length != mine.length):
                raise self._failed(peer, f"is in {_describe(theirs)}, this rank in {_describe(mine)}")
        return messages

    def _failed(self, peer: int, what: str) -> Exception:
        """Return the error to raise; tell the peers that this rank sends nothing more, whatever its program does."""
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        return dist.DistNetworkError(f"shared memory of ranks {self._ranks}: rank {self._ranks[peer]} {what}.")


def _segments(rows: Sequence[int], width: int) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((count * width for count in rows), initial=0)))


def _describe(message: _Message) -> str:
    kind, dtype = _KINDS[message.kind], str(_DTYPES[message.dtype]).removeprefix("torch.")
    size = dtype if kind == "all_to_all" else f"{message.length} {dtype}"
    return f"{kind} of {size} (round {message.number})"


def open_shared_memory(
    group: dist.ProcessGroup, timeout_s: float = DEFAULT_TIMEOUT_S, region_bytes: int = _REGION_BYTES
) -> SharedMemory | None:
    """Connect the ranks of a gloo group; None on all of them if they are not on one machine, or it offers no such
    memory.

    A rank waits up to `timeout_s` for each peer in a collective, and owns two regions of `region_bytes`.

    Collectives: two gathers of a few bytes per rank over `group`; every rank must call.
    """
    rank, size = group.rank(), group.size()
    if size == 1:
        return None
    num_bytes = 2 * size * region_bytes
    with ExitStack() as stack:
        listener = memory_fd = offer = None
        with suppress(OSError):  # unsupported or forbidden here: no rank of the group uses it then
            machine = _machine()
            memory_fd = stack.enter_context(_closing(os.memfd_create("titanlite")))
            os.ftruncate(memory_fd, num_bytes)  # allocates no memory yet
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            address = f"\0titanlite-{os.getpid()}-{secrets.token_hex(16)}"  # without a file: gone with its process
            listener.bind(address)
            listener.listen(size)
            offer = (machine, address)
        offers: list[Any] = [None] * size
        dist.all_gather_object(offers, offer, group=group)
        if listener is None or memory_fd is None or offer is None or any(not o or o[0] != offer[0] for o in offers):
            return None
        peers: dict[int, socket.socket] = {}
        memory, failure = None, None
        try:
            _connect(peers, listener, rank, [address for _, address in offers])
            with _closing(_share(memory_fd, rank, peers)) as shared_fd:
                memory = mmap.mmap(shared_fd, num_bytes)
        except (OSError, EOFError) as error:
            failure = f"rank {dist.get_rank()}: {error}"
        failures: list[Any] = [None] * size
        dist.all_gather_object(failures, failure, group=group)
        if memory is None or any(failures):
            for connection in peers.values():
                connection.close()
            logger.warning("Ranks of one machine cannot share memory and use TCP, which is slower. %s", failures)
            return None
    for connection in peers.values():
        connection.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return SharedMemory(dist.get_process_group_ranks(group), rank, dict(sorted(peers.items())), memory, region_bytes)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _machine() -> tuple[object, ...]:
    """Return a key that ranks of one launcher, kernel, network namespace and user share; OSError if not on Linux."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot, os.stat("/proc/self/ns/net").st_ino, os.getuid(), read_variable("GROUP_RANK")


def _connect(peers: dict[int, socket.socket], listener: socket.socket, rank: int, addresses: Sequence[str]) -> None:
    """Connect to every other rank, with sockets into `peers`; each rank connects to those before it."""
    listener.settimeout(_SETUP_TIMEOUT_S)
    for peer in range(rank):
        peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[peer].settimeout(_SETUP_TIMEOUT_S)
        peers[peer].connect(addresses[peer])
        peers[peer].send(struct.pack("<I", rank))
    while len(peers) < len(addresses) - 1:
        connection, _ = listener.accept()
        connection.settimeout(_SETUP_TIMEOUT_S)
        # Anybody on the machine can connect to the address; only processes of this user are let in.
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        data = connection.recv(4) if uid == os.getuid() else b""
        if len(data) == 4:
            peers[struct.unpack("<I", data)[0]] = connection
        else:
            connection.close()


def _share(descriptor: int, rank: int, peers: dict[int, socket.socket]) -> int:
    """Return the descriptor of the first rank's memory, which that rank sends to all."""
    if rank == 0:
        for connection in peers.values():
            socket.send_fds(connection, [b"memory"], [descriptor])
        return os.dup(descriptor)
    _, descriptors, _, _ = socket.recv_fds(peers[0], 16, 1)
    if not descriptors:
        raise EOFError("the first rank of the group has ended")
    return descriptors[0]
