"""How many bytes a stored weight takes: fp32, bf16, or one byte with scales of its input and its output coordinate.

`w ≈ octave · scale · q` with whole `q` from −127 to 127. The octave of an input coordinate is the power of two next to
its largest weight, so that the weights of an input of small spread, which are large, do not drown the others; `scale`
of an output coordinate is `max |w / octave| / 127` over its inputs. Both, biases and slot tables stay in fp32,
and so does the first matrix of a residual branch, in which large weights cancel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from kvbridge.errors import ArtifactError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORAGES = (*DTYPES, "int8")
# Axes over which the inputs of one output coordinate lie, by tensor of a form.
INPUT_AXES = {"weight": (2, 3), "reduce": (0,), "expand": (0,)}
SCALE, OCTAVE = "_scale", "_octave"
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


def input_octaves(weight: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """For each input coordinate (all axes but the last) the power of two next to its largest weight; 1 for zeros."""
    largest = weight.float().abs().amax(dim=-1)
    return torch.where(largest > 0, torch.exp2(largest.log2().round()), torch.ones_like(largest))


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


def pack_weights(tensors: dict[str, Tensor], exact: Iterable[str] = ()) -> dict[str, Tensor]:
    """Form tensors (named `….weight` and so on) with weights as whole numbers and scales beside them.

    Args:
        tensors: by name.
        exact: names of those that stay as they are.

    Raises:
        ArtifactError: a weight is not finite.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        axes = INPUT_AXES.get(name.rsplit(".", 1)[-1])
        if axes is None or name in exact:
            packed[name] = tensor
            continue
        if not torch.isfinite(tensor).all():
            raise ArtifactError(f"tensor {name!r} holds NaN or infinite numbers; such a bridge is not saved.")
        octave = input_octaves(tensor)
        packed[name], packed[name + SCALE] = quantise(tensor.float() / octave[..., None], axes)
        packed[name + OCTAVE] = octave
    return packed


def _scales(name: str, whole: Tensor | None, parts: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """Scales and octaves of a weight, checked; empty for one that is stored as floating-point numbers."""
    stored = whole is not None and whole.dtype == torch.int8
    found = {suffix: parts[name + suffix].float() for suffix in (SCALE, OCTAVE) if name + suffix in parts}
    for suffix in (SCALE, OCTAVE):
        if stored != (suffix in found):
            state = "lacks its" if stored else "has a"
            raise ArtifactError(f"{place}: {name} {state} {suffix.removeprefix('_')}; it is damaged.")
    if whole is not None and stored:
        outer = [size for axis, size in enumerate(whole.shape) if axis not in INPUT_AXES[name]]
        for suffix, shape in ((SCALE, outer), (OCTAVE, list(whole.shape[:-1]))):
            if list(found[suffix].shape) != shape:
                raise ArtifactError(
                    f"{place}: {name} of shape {list(whole.shape)} has a {suffix.removeprefix('_')} of shape "
                    f"{list(found[suffix].shape)}, expected {shape}; it is damaged."
                )
    return found


def unpack_weights(parts: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """One form's tensors with all weights as floating-point numbers again.

    Raises:
        ArtifactError: a scale is missing, left over or of another shape.
    """
    extra = {name + suffix for name in INPUT_AXES for suffix in (SCALE, OCTAVE)}
    unpacked = {name: tensor for name, tensor in parts.items() if name not in extra}
    for name, axes in INPUT_AXES.items():
        scales = _scales(name, unpacked.get(name), parts, place)
        if scales:
            unpacked[name] = dequantise(unpacked[name], scales[SCALE], axes) * scales[OCTAVE][..., None]
    return unpacked
