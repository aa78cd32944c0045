#!/usr/bin/env python
"""Answer single questions on one GPU, one table each.

    python scripts/bench/probes_gpu.py attention     # FlashAttention 2, cuDNN and, if installed, FlashAttention 3
    python scripts/bench/probes_gpu.py graph         # can a micro-batch be a CUDA graph, and is it faster?
    python scripts/bench/probes_gpu.py exchange      # what an all-to-all over one rank takes of host and device

Exit code 2: there is no GPU.
"""  # noqa: E501

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_common import CudaTimer, Timer, inspect_machine, markdown_table, missing_gpu, say
from torch.nn import attention as torch_attention
from train_gpu import BenchTrainer, Variant, make_batches

from titanlite.config.model import ModelConfig
from titanlite.launch.process_group import init_distributed
from titanlite.models.families import families
from titanlite.ops.attention import varlen_attention

_SHAPES = ((1, 4096), (4, 4096), (1, 32768))
_HEADS, _KV_HEADS, _WIDTH = 32, 4, 128


def _backends(starts: torch.Tensor) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """Yield names and functions of (q, k, v), each (B, S, heads, K)."""
    yield "varlen", lambda q, k, v: varlen_attention(q, k, v, starts, _WIDTH**-0.5)

    def by_cudnn(*heads: torch.Tensor) -> torch.Tensor:
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.CUDNN_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in heads)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    yield "cuDNN", by_cudnn
    if "FA3" in getattr(torch_attention, "list_flash_attention_impls", list)():
        try:
            torch_attention.activate_flash_attention_impl("FA3")
        except ImportError as error:  # its package is not installed
            say(f"FlashAttention 3: {error}")
            return
        yield "varlen, FA3", lambda q, k, v: varlen_attention(q, k, v, starts, _WIDTH**-0.5)


def _time_attention(timer: Timer, attend: Callable[..., torch.Tensor], heads: Any) -> list[float]:
    """Seconds forward and backward."""
    out = attend(*heads)
    dout = torch.ones_like(out)
    again = {"retain_graph": True}
    with torch.no_grad():
        forward = timer.measure(lambda i: attend(*heads)).seconds
    backward = timer.measure(lambda i: torch.autograd.grad(out, heads, dout, **again)).seconds
    return [forward, backward]


def compare_attention(timer: Timer, device: str, shapes: Any = _SHAPES) -> list[list[str]]:
    """TFLOP/s forward and backward of one document per row."""
    rows = []
    for batch, size in shapes:
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * size
        counts = (_HEADS, _KV_HEADS, _KV_HEADS)
        heads = [torch.randn(batch, size, n, _WIDTH, device=device).bfloat16() for n in counts]
        flops = 2 * batch * size**2 * _HEADS * _WIDTH
        for name, attend in _backends(starts):
            try:
                forward, backward = _time_attention(
                    timer, attend, [x.requires_grad_() for x in heads]
                )
                found = f"{flops / forward / 1e12:.0f}, {2.5 * flops / backward / 1e12:.0f}"
            except RuntimeError as error:  # a kernel that does not serve this
                found = str(error).splitlines()[0][:80]
            rows.append([f"{batch} x {size}", name, found])
    return rows


def compare_graph(
    timer: Timer, config: ModelConfig, device: torch.device, seq_len: int = 2048
) -> list[list[str]]:
    """Milliseconds of a micro-batch, launched and replayed, or why there is no replay."""
    sizes = (config, seq_len, 1, device)
    trainer = BenchTrainer(*sizes)
    trainer.choose(Variant("auto"))
    batch = make_batches(*sizes, documents=False)[0]

    def run(i: int = 0) -> None:
        trainer.model(batch.tokens, batch.labels).cross_entropy.backward()

    run()  # makes gradients and copies of weights, which the graph then writes to
    rows = [["launched", f"{timer.measure(run).seconds * 1e3:.1f}"]]
    try:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        return [*rows, ["replayed", str(error).splitlines()[0][:200]]]
    return [*rows, ["replayed", f"{timer.measure(lambda i: graph.replay()).seconds * 1e3:.1f}"]]


def compare_exchange(timer: Timer, device: str) -> list[list[str]]:
    """Microseconds of host and device of an all-to-all of 64 MiB over all ranks."""
    sent, got = torch.ones(2, 64 << 20, device=device, dtype=torch.int8)
    on_device = timer.measure(lambda i: dist.all_to_all_single(got, sent)).seconds
    start = time.perf_counter()
    for _ in range(20):
        dist.all_to_all_single(got, sent)
    on_host = (time.perf_counter() - start) / 20
    return [[f"{on_host * 1e6:.0f}", f"{on_device * 1e6:.0f}"]]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    questions = ("attention", "graph", "exchange")
    parser.add_argument("question", nargs="?", choices=questions, default="attention")
    question = parser.parse_args().question
    if problem := missing_gpu():
        print(f"probes_gpu.py: {problem}", file=sys.stderr)
        return 2
    timer = CudaTimer(0.2)
    say(inspect_machine(timer).describe())
    if question == "attention":
        names = ("tokens", "kernel", "TFLOP/s forward, backward")
        say(markdown_table(names, compare_attention(timer, "cuda")))
        return 0
    device = init_distributed(300)
    if question == "exchange":
        say(markdown_table(("host us", "device us"), compare_exchange(timer, "cuda")))
    else:
        rows = compare_graph(timer, families()["qwen3"].presets["0.6B"], device)
        say(markdown_table(("Qwen3-0.6B, 1 x 2048", "ms"), rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
