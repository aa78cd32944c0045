"""GPUs and links: what a plan is compared with. Figures of data sheets; every one can be overridden."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titanlite.base.errors import ConfigError
from titanlite.metrics.flops import peak_flops

_GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One GPU, and the links it has.

    Attributes:
        name: as `--gpu` takes it.
        memory_bytes: what torch reports as the device's total memory, about 1 % less than the name says.
        reserved_bytes: of it, what the CUDA context, NCCL's buffers, cuBLAS's workspace and the allocator's
            fragmentation take. An allowance; nothing of it is traced.
        flops: FLOP/s of dense matrix products in bfloat16.
        float32_flops: of those in float32, without tensor cores.
        intra_node_bytes_s: bytes per second that a GPU sends to others of its node, in one direction.
        inter_node_bytes_s: the same through its network adapter to other nodes.
        gpus_per_node: ranks r with equal r // gpus_per_node are on one node.
    """

    name: str
    memory_bytes: int
    flops: float
    float32_flops: float
    intra_node_bytes_s: float
    inter_node_bytes_s: float
    gpus_per_node: int = 8
    reserved_bytes: int = 3 * _GIB

    @property
    def usable_bytes(self) -> int:
        """Memory that training can have."""
        return self.memory_bytes - self.reserved_bytes

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: float) -> tuple[float, float]:
        """Seconds on (links inside nodes, network between nodes) that one collective over `ranks` takes at least.

        Latency is not counted. Gathers, scatters and reductions send (n - 1) / n of the bytes around a ring over the n
        ranks, reductions to all twice. A ring over several nodes crosses between them with the adapters of all its
        ranks on a node together. An all-to-all sends to each rank its share directly.

        Args:
            ranks: global ranks of the group.
            nbytes: of the whole tensor: gathered, to be scattered, reduced; for an all-to-all what each rank sends.
        """
        size = len(ranks)
        if size < 2:
            return 0.0, 0.0
        per_node = [rank // self.gpus_per_node for rank in ranks]
        beside = per_node.count(per_node[0])
        if kind == "send":  # to a neighbour along the axis
            return (
                (nbytes / self.intra_node_bytes_s, 0.0) if beside == size else (0.0, nbytes / self.inter_node_bytes_s)
            )
        if kind == "all_to_all":
            inside, outside = nbytes * (beside - 1) / size, nbytes * (size - beside) / size
            return inside / self.intra_node_bytes_s, outside / self.inter_node_bytes_s
        sent = nbytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
        if beside == size:
            return sent / self.intra_node_bytes_s, 0.0
        rate = beside * self.inter_node_bytes_s
        return 0.0, sent / (min(rate, self.intra_node_bytes_s) if beside > 1 else rate)


def _gpu(name: str, words: str, gib: float, float32: float, intra_gb_s: float, inter_gb_s: float) -> Hardware:
    flops = peak_flops(words, torch.bfloat16)
    assert flops is not None
    return Hardware(name, int(gib * _GIB), flops, float32 * 1e12, intra_gb_s * 1e9, inter_gb_s * 1e9)


# Memory as torch reports it, float32 TFLOP/s, NVLink (PCIe 4.0 x16 where there is none) and one network adapter per GPU
# as in the vendors' own 8-GPU machines, GB/s in one direction.
_GPUS = (
    _gpu("a100-40gb", "A100", 39.4, 19.5, 300, 25),
    _gpu("a100-80gb", "A100", 79.1, 19.5, 300, 25),
    _gpu("h100-80gb", "H100", 79.1, 67, 450, 50),
    _gpu("h200-141gb", "H200", 139.7, 67, 450, 50),
    _gpu("b200-180gb", "B200", 178.3, 75, 900, 50),
    _gpu("l40s-48gb", "L40S", 44.4, 91.6, 32, 25),
    _gpu("a10-24gb", "A10", 22.0, 31.2, 32, 12.5),
    _gpu("mi300x-192gb", "MI300X", 191.5, 163.4, 448, 50),
)
GPUS: dict[str, Hardware] = {gpu.name: gpu for gpu in _GPUS}
DEFAULT_GPU = "h100-80gb"


def get_hardware(name: str) -> Hardware:
    """The GPU that `--gpu` names.

    Raises:
        ConfigError: it is not in the table.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu={name}: not in the table. Known are {', '.join(GPUS)}; --flops and the other "
                          "options change single figures of one of them.")  # fmt: skip
    return GPUS[name]
