"""How many bytes a stored weight takes: fp32, bf16, or one byte and a scale per output coordinate.

`w ≈ scale · q` with whole `q` from −127 to 127 and `scale = max |w| / 127` over all inputs of an output coordinate, so
that a coordinate of small weights loses nothing to one of large weights. Scales, biases and slot tables stay as they
are.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from kvbridge.errors import ArtifactError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORAGES = (*DTYPES, "int8")
# Axes over which the inputs of one output coordinate lie, by tensor of a form.
INPUT_AXES = {"weight": (2, 3), "reduce": (0,), "expand": (0,)}
SCALE = "_scale"
LARGEST = 127


def storage_dtype(storage: torch.dtype | str) -> torch.dtype:
    """The dtype that a storage is named by.

    Raises:
        UsageError: there is no such storage.
    """
    if isinstance(storage, torch.dtype):
        return storage
    if storage not in STORAGES:
        raise UsageError(f"storage={storage}: expected one of {', '.join(STORAGES)}.")
    return DTYPES.get(storage, torch.int8)


def quantise(weight: Float[Tensor, "..."], axes: tuple[int, ...]) -> tuple[Int8[Tensor, "..."], Float[Tensor, "..."]]:
    """Whole numbers, and the scale of each output coordinate; a coordinate of zeros has scale 0.

    Args:
        weight: finite.
        axes: over which the inputs of one output coordinate lie.
    """
    weight = weight.float()
    scale = weight.abs().amax(dim=axes, keepdim=True) / LARGEST
    whole = (weight / torch.where(scale > 0, scale, 1.0)).round().clamp(-LARGEST, LARGEST)
    return whole.to(torch.int8), scale.squeeze(axes)


def dequantise(whole: Int8[Tensor, "..."], scale: Float[Tensor, "..."], axes: tuple[int, ...]) -> Float[Tensor, "..."]:
    """`scale · q` in fp32."""
    for axis in axes:
        scale = scale.unsqueeze(axis)
    return whole.float() * scale


def pack_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Form tensors (named `….weight` and so on) with weights as whole numbers and scales beside them.

    Raises:
        ArtifactError: a weight is not finite.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        axes = INPUT_AXES.get(name.rsplit(".", 1)[-1])
        if axes is None:
            packed[name] = tensor
            continue
        if not torch.isfinite(tensor).all():
            raise ArtifactError(f"tensor {name!r} holds NaN or infinite numbers; such a bridge is not saved.")
        packed[name], packed[name + SCALE] = quantise(tensor, axes)
    return packed


def unpack_weights(parts: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """One form's tensors with all weights as floating-point numbers again.

    Raises:
        ArtifactError: a scale is missing, left over or of another shape.
    """
    scales = {name + SCALE for name in INPUT_AXES}
    unpacked = {name: tensor for name, tensor in parts.items() if name not in scales}
    for name, axes in INPUT_AXES.items():
        whole, scale = unpacked.get(name), parts.get(name + SCALE)
        if (whole is not None and whole.dtype == torch.int8) != (scale is not None):
            raise ArtifactError(f"{place}: {name} {'lacks its' if scale is None else 'has a'} scale; it is damaged.")
        if whole is None or scale is None:
            continue
        kept = tuple(size for axis, size in enumerate(whole.shape) if axis not in axes)
        if tuple(scale.shape) != kept or not scale.is_floating_point():
            raise ArtifactError(
                f"{place}: {name} of shape {tuple(whole.shape)} has a scale {scale.dtype}{list(scale.shape)}, expected "
                f"floating-point {list(kept)}; it is damaged."
            )
        unpacked[name] = dequantise(whole, scale.float(), axes)
    return unpacked
