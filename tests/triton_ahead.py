"""Compile the Triton kernels for cards that need not be there, and print what the compilers made of them.

Run as a script, without TRITON_INTERPRET: `python tests/triton_ahead.py 90 gather expand`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbridge.kernels.triton import config, expand, gather, product, reduce

TABLE = {"segments": "*i64", "entries": "*i64", "blocks": "*i32", "slots": "*i64", "tables": "*fp32"}
TABLE |= {"bias": "*fp32", "offsets": "*fp32", "rows": "i32", "tokens": "i32", "pitch": "i32"}
# The JIT finds these out from the arguments: pointers from an allocator, and a pitch that the workspace rounds up.
ALIGNED = {"segments", "entries", "blocks", "slots", "tables", "bias", "offsets", "workspace", "pitch"}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _product(half: int, rows: int, capability: int, dtype: torch.dtype, stored: torch.dtype) -> dict[str, Any]:
    depth = config.choose_depth({1024}, dtype)
    tile = config.choose_product(rows, half, depth, stored, dtype, divmod(capability, 10))
    shape = {"BLOCK_T": tile.tokens, "BLOCK_H": tile.half, "BLOCK_K": tile.depth, "TERM": product.TERM}
    kinds = {"STORED": gather.STORED[stored], "ALIGN": 16, "EVEN": True, "PRECISION": "ieee"}
    return {"constants": shape | kinds, "num_warps": tile.warps, "num_stages": tile.stages}


def case(name: str, capability: int) -> dict[str, Any]:
    """One kernel with the configuration of a shape; `expand-int8`, `expand-fp32`: with those weights."""
    kernel, _, kind = name.partition("-")
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    stored = torch.int8 if kind == "int8" else dtype
    if kernel == "gather":
        tile = config.choose_gather(128)
        constants = {"FROM": gather.TYPES[dtype], "INTERLEAVED": kind == "interleaved", "ALIGN": 16}
        constants |= {"FIELDS": gather.SEGMENT, "BLOCK_T": tile.tokens, "HALF": tile.half}
        made = {"fn": gather.gather_kernel, "constants": constants, "num_warps": tile.warps, "num_stages": 1}
    elif kernel == "reduce":
        made = _product(32, 2048, capability, dtype, stored)
        made["constants"] |= {"QUADRATIC": kind == "quadratic", "HEADER": reduce.HEADER}
        made["fn"] = reduce.reduce_kernel
    else:
        made = _product(64, 2048, capability, dtype, stored)
        constants = {"TERMS": 2 if kind == "branch" else 1, "TO": gather.TYPES[dtype], "HEADER": expand.HEADER}
        made["constants"] |= constants | {"INTERLEAVED": kind == "interleaved", "HALF": 64}
        made["fn"] = expand.expand_kernel
    return made | {"workspace": "*" + SHORT[dtype]}


def compile_case(name: str, capability: int) -> dict[str, Any]:
    """Registers, spilled bytes, shared memory and the instructions of interest of one kernel for one architecture."""
    made = case(name, capability)
    kernel = made["fn"]
    signature = {
        argument: "constexpr" if argument in made["constants"] else (TABLE | {"workspace": made["workspace"]})[argument]
        for argument in kernel.arg_names
    }
    aligned = {(number,): [["tt.divisibility", 16]] for number, name in enumerate(kernel.arg_names) if name in ALIGNED}
    source = ASTSource(kernel, signature, constexprs=made["constants"], attrs=aligned)
    options = {"num_warps": made["num_warps"], "num_stages": made["num_stages"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return _resources(compiled.asm["cubin"]) | {
        "shared": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global[^;]*\.v4\.b32|cp\.async\.cg\.shared\.global[^;]*, 0x10", ptx)),
        "wide_stores": len(re.findall(r"st\.global[^;]*\.v4\.b32", ptx)),
        "tensor_cores": sorted(set(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx))),
    }


def _resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", shown.stdout)
    if found is None:
        raise LookupError(f"cuobjdump showed no resource usage: {shown.stdout}")
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local}


if __name__ == "__main__":
    capability, names = int(sys.argv[1]), sys.argv[2:]
    print(json.dumps({name: compile_case(name, capability) for name in names}))
