"""What a device can do: in which dtype it multiplies matrices fast, and whether the Triton kernels run on it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

# The oldest architecture that the kernels are compiled for in the tests.
OLDEST = (8, 0)


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products (AMX or AVX-512's); without, they are slower than fp32."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    found = (getattr(torch.cpu, name, None) for name in probes)
    return any(probe() for probe in found if probe is not None)


def product_dtype(cache: torch.dtype, device: torch.device) -> torch.dtype:
    """What a map multiplies in when it fills a cache of a dtype: never more coarsely than the cache stores.

    Args:
        cache: dtype of the target's cache.
        device: where the map is executed.

    Returns:
        The cache's dtype on an accelerator; on a CPU bf16 for a bf16 cache where the CPU multiplies it, else fp32.
    """
    if device.type != "cpu":
        return cache
    return cache if cache == torch.bfloat16 and cpu_multiplies_bf16() else torch.float32


def runs_triton(device: torch.device) -> bool:
    """Whether maps are executed by the Triton kernels: on a CUDA device from sm_80 on, where triton is installed."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST
