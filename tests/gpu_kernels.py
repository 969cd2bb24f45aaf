"""Compiles every Triton kernel for GPUs that need not be there; run as a script, without Triton's interpreter.

The interpreter tries a kernel's logic; whether its types and shapes are such that a GPU's compiler takes them, only the
compiler knows, and it comes with Triton whole, down to machine code. Prints a line for each kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minieagle.models.grouped_int4 import _grouped
from minieagle.models.row_attention import CHUNK, HEADS, KEYS, WARPS, _attend
from minieagle.models.tiled_linear import COLUMNS, INNER, ROWS, _product

TILE = {"ROWS": ROWS, "COLUMNS": COLUMNS}
TABLES = {"shared_slots": "*i64", "shared_mask": "*fp32", "tail_slots": "*i64", "tail_mask": "*fp32"}


def attention(key_width: int, value_start: int, value_width: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    sizes = {"KEY_WIDTH": key_width, "VALUE_START": value_start, "VALUE_WIDTH": value_width}
    tile = {"VALUE_TILE": triton.next_power_of_2(value_width), "CHUNK": CHUNK, "HEADS": HEADS, "KEYS": KEYS}
    return _attend, {"q": "*fp32", "cache": "*bf16", "out": "*fp32"} | TABLES, sizes | tile


def linear(dtype: str, dot: Any) -> tuple[Any, dict[str, str], dict[str, Any]]:
    return _product, dict.fromkeys(("x", "weight", "out"), f"*{dtype}"), TILE | {"INNER": INNER, "DOT": dot}


def experts(weight: str, word: int, inner: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    tensors = {"x": "*bf16", "weight": weight, "scale": "*bf16", "out": "*bf16"}
    tables = {"tile_expert": "*i64", "tile_pairs": "*i64"}
    chosen = {"PAIRS_A_ROW": 8, "WORD": word, "INNER": inner, "PACKED": word > 1, "DOT": tl.bfloat16}
    return _grouped, tensors | tables, TILE | chosen


KERNELS = {
    "linear, bfloat16": linear("bf16", tl.bfloat16),
    "linear, float32": linear("fp32", tl.float32),
    "experts, INT4 in groups of 32": experts("*i32", 8, 32),
    "experts, bfloat16": experts("*bf16", 1, INNER),
    "attention, latent 512 + 64": attention(576, 64, 512),
    "attention, latent 64 + 16": attention(80, 16, 64),
    "attention, heads of 128": attention(128, 128, 128),
}


def compiled(kernel: Any, tensors: dict[str, str], constants: dict[str, Any], capability: int) -> Any:
    names = [parameter.name for parameter in kernel.params]
    plain = {name: "constexpr" if name in constants else "i32" for name in names}
    source = ASTSource(kernel, plain | tensors, {(names.index(name),): value for name, value in constants.items()})
    options = {"enable_fp_fusion": True, "num_warps": WARPS if kernel is _attend else 4}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    for name, (kernel, tensors, constants) in KERNELS.items():
        made = compiled(kernel, tensors, constants, int(sys.argv[1]))
        print(f"{name}: {len(made.asm['cubin'])} bytes, {made.metadata.shared} bytes of shared memory")
