#!/usr/bin/env python
"""Compile every Triton kernel of titanlite in every configuration of its table, for real GPUs,
without one.

    python scripts/compile_kernels.py [--arch 80,90,100] [-k SUBSTRING] [--jobs 2]

Prints registers, stack, shared memory and the instructions that matter, and ends with exit code 1
if a kernel does not compile, spills registers to the stack (except for `_KNOWN_STACKS`), needs more
shared memory than the target has, or does not use the tensor cores as it should (wgmma on sm_90,
after a fence; tcgen05 on sm_100). Triton's wheel brings ptxas and cuobjdump; no driver is touched.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are decorated
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from titanlite.features.lora import block_formats_triton as blocks
from titanlite.features.lora.block_formats import BLOCK_FORMATS
from titanlite.features.rounded_adamw import adamw_triton as adamw
from titanlite.ops import delta_inputs_triton as inputs
from titanlite.ops import elementwise_triton as elementwise
from titanlite.ops import gated_delta_triton as delta
from titanlite.ops import kernels_triton as kernels
from titanlite.ops import launchers as launch
from titanlite.ops import routing_triton as routing
from titanlite.ops.matmul import has_fences

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Shared memory that one block can have, in bytes: sm_80 is A100's; the `small` tiles must also fit
# sm_86 and sm_89.
_SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Bytes of stack per thread by version of Triton, architecture and kernel, where no options were
# found that need none.
_KNOWN_STACKS = {
    "3.7": {(80, "delta dread bf16"): 160, (80, "delta dsolve bf16"): 96},
    "3.9": {
        (80, "delta dstates bf16"): 8,
        (80, "delta dread bf16"): 256,
        (80, "delta dsolve bf16"): 344,
        (90, "wgrad fp32 adds"): 8,
        (100, "delta solve bf16"): 88,
        (100, "delta dstates bf16"): 168,
    },
}


class Case(NamedTuple):
    """A kernel as the launcher would specialize it: types of run-time arguments, values of
    compile-time ones.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    tile: launch.Tile
    divisible: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What became of a case; `error` is None if it passes."""

    arch: int
    name: str
    registers: int = 0
    stack: int = 0
    shared: int = 0
    wgmma: int = 0
    tcgen05: int = 0
    tma: int = 0
    error: str | None = None


def cases(arch: int) -> Iterator[Case]:
    """Everything that the launchers can start on this architecture."""
    table = launch.TILES[launch.table_of(arch // 10, _SHARED[arch])]
    for dtype in ("bf16", "fp16", "fp32"):
        tiles = launch.TILES["float32"] if dtype == "fp32" else table
        # float16 differs from bfloat16 in the type of the instruction only.
        names = ("gemm", "wgrad") if dtype == "fp16" else tuple(tiles)
        for name in names:
            for tma in (
                (False, True)
                if arch >= 90 and dtype != "fp32" and name != "wgrad_gather"
                else (False,)
            ):
                if name.startswith("wgrad"):
                    for gather in ("x", "dy") if name == "wgrad_gather" else (None,):
                        for adds in (False, True):
                            full = f"{name} {dtype}{' adds' if adds else ''}"
                            yield _wgrad(full, dtype, tiles[name], gather, tma=tma, adds=adds)
                    continue
                epilogue = {
                    "swiglu": kernels.SWIGLU,
                    "swiglu_backward": kernels.SWIGLU_BACKWARD,
                }.get(name, kernels.PLAIN)
                gathers = (False, True) if epilogue else (False,)
                tile = tiles[name] if tma else launch.without_tma(name, tiles[name])
                for gather in gathers:
                    # Forward reads a weight whose reduction dim is contiguous, the input's gradient
                    # the other one.
                    for k_major in (
                        (True, False) if name == "gemm" else (epilogue != kernels.SWIGLU_BACKWARD,)
                    ):
                        yield _rows(f"{name} {dtype}", dtype, tile, epilogue, gather, k_major, tma)
    yield _rows(
        "gemm bf16 ones",
        "bf16",
        table["gemm"],
        kernels.PLAIN,
        False,
        True,
        False,
        ones=("N", "K", "E"),
    )
    sizes = ("N", "stride_ym", "stride_om")
    for index in ("i32", "i64"):  # of experts, and of tokens on their way to other ranks
        types = {"y_ptr": "*bf16", "rows_ptr": f"*{index}", "out_ptr": "*bf16", "M": "i32"}
        types |= dict.fromkeys(sizes, "i32")
        tile, constants = launch.Tile(1, 1024, 1, 4, 3, 1), {"TOP_K": 8, "BN": 1024}
        yield Case(
            f"gather_sum bf16 {index}", kernels.gather_sum_kernel, types, constants, tile, sizes
        )
    for dtype in ("bf16", "fp32"):
        yield from _softmax(dtype)
        yield from _decode(dtype)
        yield from _elementwise(dtype)
        yield from _adamw(dtype)
    yield from _routing()
    if has_fences(triton.__version__):  # or torch's operators are taken
        yield from _gated_delta(launch.table_of(arch // 10, _SHARED[arch]))
        yield from _delta_inputs()


def _gated_delta(table: str) -> Iterator[Case]:
    wide = ("g_ptr", "beta_ptr", "sums_ptr", "first_ptr", "last_ptr", "dlast_ptr", "dfirst_ptr")
    wide += ("dk_ptr", "dsums_ptr", "wrote_ptr", "carried_ptr", "dbeta_ptr", "dg_ptr")
    for name, kernel in delta.KERNELS.items():
        options = {"H": 16, "G": 32, "V": 128} | delta.options_of(table, name)
        tile = launch.Tile(64, 1, 64, options.pop("num_warps"), options.pop("num_stages"), 1)
        names = [name for name in kernel.arg_names if name not in options]
        for known in (False, True) if name == "solve" else (None,):
            constants = options if known is None else options | {"IS_KNOWN": known}
            types = {pointer: "*fp32" if pointer in wide else "*bf16" for pointer in names}
            types |= {"documents_ptr": "*i32", "S": "i32", "N": "i32"}
            if name == "dsolve":
                types["dk_ptr"] = "*bf16"
            full = f"delta {name} bf16{' known' if known else ''}"
            yield Case(full, kernel, types, constants, tile, ())


def _delta_inputs() -> Iterator[Case]:
    constants = {"W": 4, "K": 128, "BT": inputs.TOKENS}
    for kernel, warps in (
        (inputs.delta_inputs_kernel, inputs.WARPS),
        (inputs.delta_inputs_backward_kernel, inputs.BACKWARD_WARPS),
    ):
        types = dict.fromkeys(kernel.arg_names, "i32")
        types |= {key: "*bf16" for key in types if key.endswith("_ptr")}
        types |= {"documents_ptr": "*i32", "dtaps_ptr": "*fp32"}
        sizes = ("J", "stride_b", "stride_t", "stride_h")
        tile = launch.Tile(inputs.TOKENS, 128, 1, warps, 3, 1)
        name = kernel.__name__.removesuffix("_kernel")
        yield Case(f"{name} bf16", kernel, types, constants, tile, sizes)


def _elementwise(dtype: str) -> Iterator[Case]:
    """Cases at a width of 2048, or of 8192 for norms of whole rows, with heads of 128, and of 256
    that are partly rotated.
    """
    gate = {"BLOCK": 128, "BR": elementwise.NORM_ROWS}
    itemsize = 4 if dtype == "fp32" else 2
    norms = {f"{n} ": elementwise.norm_options(n, itemsize) for n in (2048, 8192)}
    heads = {"": elementwise.head_options(128, 128, 32)}
    heads["partial "] = elementwise.head_options(256, 64, 16)
    no_weights = {"qw_ptr": None, "kw_ptr": None}
    swiglu = {"": {"BLOCK": elementwise.SWIGLU_BLOCK}}
    forward_only = {"plain ": heads[""] | no_weights}
    for name, variants in {
        "add_norm": norms,
        "add_norm_backward": norms,
        "gated_norm": {"": gate},
        "gated_norm_backward": {"": gate},
        "rotate_heads": heads | forward_only,
        "rotate_heads_backward": heads,
        "swiglu_apart": swiglu,
        "swiglu_apart_backward": swiglu,
    }.items():
        kernel = getattr(elementwise, f"{name}_kernel")
        for variant, options in variants.items():
            tile = launch.Tile(1, 1, 1, options.get("num_warps", 4), 3, 1)
            constants = {key: value for key, value in options.items() if key != "num_warps"}
            types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(
                ("eps", "offset"), "fp32"
            )
            pointers = [key for key in types if key.endswith(("_ptr", "_out"))]
            types |= dict.fromkeys(pointers, f"*{dtype}") | {"dw_ptr": "*fp32"}
            sizes = tuple(key for key in ("D", "stride_t", "stride_h") if key in kernel.arg_names)
            yield Case(f"{name} {variant}{dtype}", kernel, types, constants, tile, sizes)


def _routing() -> Iterator[Case]:
    """Cases of few experts, of Qwen3, of DeepSeek-V3 with its groups, and of Qwen3-Next."""
    for num_experts, groups, limited in ((16, 1, 1), (128, 1, 1), (256, 8, 4), (512, 1, 1)):
        choice = routing.sizes_of_choice(num_experts)
        choice |= {"IS_SOFTMAX": groups == 1, "IS_NORMALIZED": num_experts > 16}
        limits = {"NUM_GROUPS": groups, "NUM_LIMITED": limited, "K_CEIL": 8}
        order = routing.sizes_of_order(num_experts)
        for name, constants in {
            "choose": choice | limits,
            "weigh_backward": choice,
            "count": order,
            "place": order,
        }.items():
            kernel = getattr(routing, f"{name}_kernel")
            types = dict.fromkeys(kernel.arg_names, "i32")
            types |= {key: "*fp32" for key in types if key.endswith("_ptr")}
            types |= dict.fromkeys(("order_ptr", "token_ptr", "rows_ptr", "ends_ptr"), "*i32")
            types |= {"ids_ptr": "*i64", "counts_ptr": "*i32", "valid_ptr": "*i1"}
            tile = launch.Tile(1, 1, 1, 4, 3, 1)
            sizes = tuple(key for key in ("S", "E", "G") if key in kernel.arg_names)
            yield Case(f"{name} {num_experts} experts", kernel, types, constants, tile, sizes)


def _adamw(dtype: str) -> Iterator[Case]:
    kernel, moments = adamw.adamw_kernel, dict.fromkeys(("mean_ptr", "square_ptr"), "*bf16")
    types = dict.fromkeys(kernel.arg_names, "fp32") | dict.fromkeys(("C", "key0", "key1"), "i32")
    types |= dict.fromkeys(("N", "first", "row"), "i64") | moments
    types |= dict.fromkeys(("param_ptr", "grad_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("step_ptr", "found_inf_ptr"), "*fp32")
    for whole_rows in (True, False):
        constants = adamw.FACTORS | {"WHOLE_ROWS": whole_rows, "BLOCK": adamw.BLOCK}
        tile = launch.Tile(1, adamw.BLOCK, 1, adamw.WARPS, 3, 1)
        yield Case(f"adamw {dtype} {whole_rows}", kernel, types, constants, tile, ())


def _decode(dtype: str) -> Iterator[Case]:
    sizes = ("num_records", "records_per_row", "width")
    types = {
        "codes_ptr": "*u8",
        "factors_ptr": "*fp32",
        "table_ptr": "*fp32",
        "out_ptr": f"*{dtype}",
    }
    for layout in BLOCK_FORMATS.values():
        records = blocks.VALUES // layout.block
        constants = {"BLOCK": layout.block, "CODE_BYTES": layout.code_bytes, "RECORDS": records}
        constants["LOW_FIRST"] = layout.low_first
        tile = launch.Tile(1, blocks.VALUES, 1, blocks.WARPS, 3, 1)
        kernel = blocks.decode_blocks_kernel
        yield Case(
            f"decode {layout.name} {dtype}",
            kernel,
            types | dict.fromkeys(sizes, "i32"),
            constants,
            tile,
            sizes,
        )


def _softmax(dtype: str) -> Iterator[Case]:
    pointers = {"logits_ptr": f"*{dtype}", "column_ptr": "*i64"}
    sizes = {"V": "i32", "stride_c": "i32"}
    for kernel, floats in (
        (kernels.softmax_statistics_kernel, ("max_ptr", "sum_ptr", "target_ptr")),
        (kernels.softmax_gradient_kernel, ("shift_ptr", "scale_ptr", "hit_ptr")),
    ):
        name = kernel.__name__.removesuffix("_kernel")
        types = pointers | dict.fromkeys(floats, "*fp32") | sizes
        tile = launch.Tile(1, launch.SOFTMAX_BLOCK, 1, launch.SOFTMAX_WARPS, 3, 1)
        yield Case(
            f"{name} {dtype}", kernel, types, {"BLOCK": launch.SOFTMAX_BLOCK}, tile, tuple(sizes)
        )


def _rows(
    name: str,
    dtype: str,
    tile: launch.Tile,
    epilogue: int,
    gather: bool,
    k_major: bool,
    tma: bool,
    ones: Sequence[str] = (),
) -> Case:
    tma_x = tma and not gather
    block = [1, tile.cols, tile.depth] if k_major else [1, tile.depth, tile.cols]
    pointers = {
        "x": f"tensordesc<{dtype}[{tile.rows}, {tile.depth}]>" if tma_x else f"*{dtype}",
        "w": f"tensordesc<{dtype}{block}>" if tma else f"*{dtype}",
        "y_ptr": f"*{dtype}" if epilogue != kernels.SWIGLU else None,
        "z_ptr": f"*{dtype}" if epilogue else None,
        "h_ptr": f"*{dtype}" if epilogue else None,
        "weight_ptr": "*fp32" if epilogue else None,
        "dweight_ptr": "*fp32" if epilogue == kernels.SWIGLU_BACKWARD else None,
        "rows_ptr": "*i32" if gather else None,
        "offsets_ptr": "*i32",
    }
    constants: dict[str, Any] = {name: None for name, kind in pointers.items() if kind is None}
    # Triton makes constants of strides, and of other integers, that are 1.
    constants |= {"stride_wk" if k_major else "stride_wn": 1, **dict.fromkeys(ones, 1)}
    constants |= {
        "BM": tile.rows,
        "BN": tile.cols,
        "BK": tile.depth,
        "BAND": 8,
        "E_CEIL": 256,
        "EPILOGUE": epilogue,
        "K_MAJOR": k_major,
        "TMA_X": tma_x,
        "TMA_W": tma,
        "EVEN_K": True,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }
    types = {name: kind for name, kind in pointers.items() if kind is not None}
    integers = (
        "M",
        "N",
        "K",
        "E",
        *(f"stride_{s}" for s in ("xm", "we", "wn", "wk")),
    )
    types |= {name: "i32" for name in integers if name not in constants}
    full = (
        f"{name}{' tma' if tma else ''}{' gather' if gather else ''}{'' if k_major else ' n-major'}"
    )
    return Case(full, kernels.row_gemm_kernel, types, constants, tile, integers[1:3] + integers[4:])


def _wgrad(
    name: str, dtype: str, tile: launch.Tile, gather: str | None, *, tma: bool, adds: bool
) -> Case:
    integers = ("N", "K", "E", *(f"stride_{s}" for s in ("xm", "dm", "we", "wk", "wn")))
    types = {
        "x": f"tensordesc<{dtype}[{tile.depth}, {tile.rows}]>" if tma else f"*{dtype}",
        "dy": f"tensordesc<{dtype}[{tile.depth}, {tile.cols}]>" if tma else f"*{dtype}",
        "dw_ptr": "*fp32" if adds else f"*{dtype}",
        "offsets_ptr": "*i32",
        **({f"{gather}_rows_ptr": "*i32"} if gather else {}),
        **dict.fromkeys(integers, "i32"),
    }
    constants = {
        **{f"{name}_rows_ptr": None for name in ("x", "dy") if name != gather},
        "stride_wk": 1,
        "BK": tile.rows,
        "BN": tile.cols,
        "BM": tile.depth,
        "BAND": 8,
        "ADDS": adds,
        "TMA": tma,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }
    del types["stride_wk"]
    full = f"{name}{' tma' if tma else ''}{f' gather {gather}' if gather else ''}"
    return Case(full, kernels.wgrad_kernel, types, constants, tile, integers[:2] + integers[3:])


def _launched(arch: int) -> Iterator[Case]:
    """`cases`, without fences as the launchers start them: rows are copied before, and no TMA means
    one stage.
    """
    for case in cases(arch):
        if arch != 90 or has_fences(triton.__version__) or case.tile.depth == 1:
            yield case
        elif "gather" not in case.name.split():
            stages = case.tile.stages if "tma" in case.name.split() else 1
            yield case._replace(tile=case.tile._replace(stages=stages))


def compile_case(arch: int, case: Case) -> Result:
    """Compile one kernel and look at what came out."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name], constants[i,] = "constexpr", case.constants[name]
            continue
        signature[name] = case.types[name]
        # Without this, loads are not vectorized, and it is another kernel than the one that runs.
        if case.types[name].startswith("*") or name in case.divisible:
            attributes[i,] = [["tt.divisibility", 16]]
    try:
        compiled = triton.compile(
            ASTSource(case.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", arch, 32),
            options={
                "num_warps": case.tile.warps,
                "num_stages": case.tile.stages,
                "enable_fp_fusion": True,
            },
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return Result(arch, case.name, error=f"{type(error).__name__}: {str(error)[:300]}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = (int(_first(rf"{key}:(\d+)", usage)) for key in ("REG", "STACK"))
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    counts = [
        len(re.findall(what, ptx))
        for what in (r"wgmma\.mma_async", r"tcgen05\.mma", r"cp\.async\.bulk\.tensor")
    ]
    problems = []
    known = _KNOWN_STACKS.get(triton.__version__.rpartition(".")[0], {}).get((arch, case.name), 0)
    if stack != known:
        problems.append(f"{stack} bytes of stack, and {known} are known")
    if shared > _SHARED[arch]:
        problems.append(f"{shared} bytes of shared memory, the target has {_SHARED[arch]}")
    multiplies = case.tile.depth > 1 and "fp32" not in case.name
    if multiplies and ((arch == 90 and not counts[0]) or (arch == 100 and not counts[1])):
        problems.append("no tensor core instructions")
    if counts[0] and "cp.async.c" in ptx and "fence.proxy.async" not in ptx:
        problems.append("no fence between cp.async and wgmma")
    if "tma" in case.name.split() and not counts[2]:
        problems.append("no TMA loads")
    return Result(
        arch, case.name, registers, stack, shared, *counts, error="; ".join(problems) or None
    )


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no {pattern}: {text}")
    return match[1]


def _compile_named(job: tuple[int, str]) -> Result:
    arch, name = job
    return compile_case(arch, next(case for case in _launched(arch) if case.name == name))


def main() -> int:
    """Compile what was asked for; 1 if something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="80,90,100", help="compute capabilities")
    parser.add_argument("-k", default="", help="only names that contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    known = parser.parse_args()
    jobs = [
        (arch, case.name)
        for arch in map(int, known.arch.split(","))
        for case in _launched(arch)
        if known.k in case.name
    ]
    print(f"triton {triton.__version__}, {len(jobs)} kernels")
    failed = 0
    with ProcessPoolExecutor(known.jobs) as pool:
        for r in pool.map(_compile_named, jobs):
            failed += r.error is not None
            facts = (
                f"{r.registers:3d} registers {r.stack:4d} B stack {r.shared >> 10:3d} KiB shared"
            )
            facts += f"  wgmma {r.wgmma:3d}  tcgen05 {r.tcgen05:2d}  tma {r.tma:2d}"
            print(f"sm_{r.arch:<4} {r.name:40s} {facts}  {r.error or ''}".rstrip(), flush=True)
    print(f"{len(jobs)} kernels, {failed} failed")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
