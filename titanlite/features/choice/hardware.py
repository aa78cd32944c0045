"""GPUs and their interconnects, and the fraction of their peak rates that calls are expected to
reach.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from titanlite.base.errors import ConfigError
from titanlite.base.text import find_near

_GIB = 2**30

# (peak, fraction of it that calls reach). The peaks: matmuls in bfloat16 ("flops"), in float32, or
# the memory. Measured on an H200 by scripts/bench/step_gpu.py (docs/benchmarks.md), except the ones
# marked as assumed.
RATES = {
    # cuBLAS; 0.82 when run alone: a whole step is at the GPU's power limit
    "dense": ("flops", 0.72),
    "grouped": ("flops", 0.48),  # experts: rows 0.54, weight gradients 0.40
    "grouped wide": ("flops", 0.55),  # experts of 1024 or wider: 0.59, 0.48
    "flash": ("flops", 0.29),  # FlashAttention-2, causal: 0.33, backward 0.28
    # the memory-efficient kernel, which takes a mask and also computes the masked part
    "masked": ("flops", 0.115),
    "float32": ("float32_flops", 0.80),  # without tensor cores; assumed
    "memory": ("memory_bytes_s", 0.70),  # copies, casts, permutations, float32
    "elementwise": ("memory_bytes_s", 0.40),  # norms, rope and activations of two bytes
    "optimizer": ("memory_bytes_s", 0.58),  # fused AdamW
}
LINKS = 0.65  # fraction of the interconnects' rates that NCCL reaches
KERNEL_S = 2e-6  # from the end of one kernel to the start of the next
LAUNCH_S = 45e-6  # on the host, per kernel, with autograd and FSDP2: 43 to 55 us measured
COLLECTIVE_S = 20e-6  # latency
SYNC_S = 100e-6  # the GPU is idle from the end of its queue until the host has launched again


@dataclass(frozen=True)
class Hardware:
    """One GPU and its interconnects."""

    name: str  # as in `--gpu`
    # the device's total memory as torch reports it, about 1 % less than its name says
    memory_bytes: int
    flops: float  # of dense matmuls in bfloat16, per second
    float32_flops: float  # of matmuls in float32, without tensor cores
    memory_bytes_s: float  # read from and written to its memory
    intra_node_bytes_s: float  # sent to other GPUs of its node, in one direction
    inter_node_bytes_s: float  # the same through its network adapter to other nodes
    gpus_per_node: int = 8  # ranks r with equal r // gpus_per_node are on one node
    # allowance for the CUDA context, NCCL, cuBLAS and fragmentation, which are not traced
    reserved_bytes: int = 3 * _GIB

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes

    def rate(self, name: str) -> float:
        """Return the FLOP/s or bytes per second that calls of a kind in `RATES` are expected to
        reach.
        """
        peak, share = RATES[name]
        return getattr(self, peak) * share

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: float) -> tuple[float, float]:
        """Return the least seconds of one collective over `ranks`, on (interconnects inside nodes,
        network between nodes).

        Latency is not counted. Gathers, scatters and reductions send (n - 1) / n of the bytes
        around a ring over the n ranks; all-reduces send them twice. A ring over several nodes uses
        the adapters of all its ranks on a node together. An all-to-all sends each rank's part to it
        directly.

        Args:
            ranks: global ranks of the group.
            nbytes: bytes of the whole tensor that is gathered, scattered or reduced; for an
                all-to-all, the bytes that each rank sends.
        """
        size = len(ranks)
        if size < 2:
            return 0.0, 0.0
        nodes = [rank // self.gpus_per_node for rank in ranks]
        on_node = nodes.count(nodes[0])
        if kind == "send":  # to a neighbour along the axis
            return (
                (nbytes / self.intra_node_bytes_s, 0.0)
                if on_node == size
                else (0.0, nbytes / self.inter_node_bytes_s)
            )
        if kind.endswith("all_to_all"):
            inside, outside = nbytes * (on_node - 1) / size, nbytes * (size - on_node) / size
            return inside / self.intra_node_bytes_s, outside / self.inter_node_bytes_s
        sent = nbytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
        if on_node == size:
            return sent / self.intra_node_bytes_s, 0.0
        rate = on_node * self.inter_node_bytes_s
        return 0.0, sent / (min(rate, self.intra_node_bytes_s) if on_node > 1 else rate)


# Name, TFLOP/s of dense matmuls in bfloat16 (with float32 sums) and in float32, GiB as torch
# reports them, TB/s of the memory; GB/s in one direction of NVLink (or else PCIe x16) and of one
# network adapter per GPU, as in the vendors' own machines with 8 GPUs. From the data sheets of
# NVIDIA and AMD; for RTX from the white papers of GA102, Ada and Blackwell. A short name selects
# the first entry that begins with it.
_TABLE = (
    ("h100-80gb", 989, 67, 79.1, 3.35, 450, 50),
    ("h200-141gb", 989, 67, 139.7, 4.8, 450, 50),
    ("b200-180gb", 2250, 75, 178.3, 8.0, 900, 50),
    ("a100-80gb", 312, 19.5, 79.1, 2.04, 300, 25),
    ("a100-40gb", 312, 19.5, 39.4, 1.555, 300, 25),
    ("l40s-48gb", 362, 91.6, 44.4, 0.864, 32, 25),
    ("rtx4090-24gb", 165.2, 82.6, 23.5, 1.008, 32, 12.5),
    ("rtx5090-32gb", 209.5, 104.8, 31.4, 1.792, 64, 12.5),
    ("rtx3090-24gb", 71, 35.6, 23.5, 0.936, 32, 12.5),
    ("mi300x-192gb", 1307, 163.4, 191.5, 5.3, 448, 50),
)
GPUS = {
    name: Hardware(
        name, int(gib * _GIB), flops * 1e12, wide * 1e12, memory * 1e12, intra * 1e9, inter * 1e9
    )
    for name, flops, wide, gib, memory, intra, inter in _TABLE
}
DEFAULT_GPU = "h100-80gb"


def get_hardware(name: str) -> Hardware:
    """Return the GPU that `--gpu` names: "h100", "RTX 4090", "a100-40gb".

    Raises:
        ConfigError: the GPU is not in the table.
    """

    def plain(text: str) -> str:
        left_out = r"nvidia|geforce|amd|instinct|sxm\d?|hbm\d?e?|(?<=\d)gb?\b|[^a-z0-9]"
        return re.sub(left_out, "", text.lower())

    wanted = plain(name)
    for known, gpu in GPUS.items():
        names = accumulate(known.split("-"))  # accepts h100 and h10080gb, but not h10
        if wanted in {plain(text).removeprefix(brand) for text in names for brand in ("", "rtx")}:
            return gpu
    near = find_near(wanted, GPUS)
    hint = f"Did you mean {near}? " if near else ""
    raise ConfigError(
        f"--gpu={name}: not in the table. {hint}Known are {', '.join(GPUS)}; --flops, --memory-gib "
        "and others change single figures of one of them."
    )
