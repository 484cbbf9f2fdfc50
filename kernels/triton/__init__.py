"""Executing forms on a CUDA device, in at most three launches whatever the number of layers.

1. `gather`: source cache (contiguous or paged) → rows of content states `x`, RoPE taken off.
2. `reduce`: `z = φ(x P + a)`, for shared bases and residual branches; left out where a map has none.
3. `expand`: `y = [x | z] W + b`, RoPE of the target put on, written into the target's cache (contiguous or paged).

Needs the extra `triton`. Nothing else in kvbridge imports this package when it is loaded.
"""

from kvbridge.errors import UsageError

try:
    import triton as _triton  # noqa: F401
except ImportError as missing:
    raise UsageError("the Triton kernels need the package triton; install `kvbridge[triton]`.") from missing

from kvbridge.kernels.triton.pages import Pages
from kvbridge.kernels.triton.program import Program, compile_map
from kvbridge.kernels.triton.run import run
from kvbridge.kernels.triton.sides import Side, Tables

__all__ = ["Pages", "Program", "Side", "Tables", "compile_map", "run"]
