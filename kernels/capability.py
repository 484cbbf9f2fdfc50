"""In which dtype a device multiplies matrices fast."""

from __future__ import annotations

import torch


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
