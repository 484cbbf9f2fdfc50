"""How large a calibration and its map will be, before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from kvbridge.calibration.moments import rows_per_product
from kvbridge.calibration.passes import SUM_BYTES, plan_passes
from kvbridge.calibration.products import KNOWN, SKETCH, Extent, MomentBlock, joint_blocks
from kvbridge.calibration.rows import residual_layers
from kvbridge.calibration.shapes import ModelShape
from kvbridge.calibration.sketch import SKETCHED, sketched
from kvbridge.errors import UsageError

# Weights, states and maps in bf16; rows that wait for a product, and solutions, in fp32 and fp64.
HALF, SINGLE, DOUBLE = 2, 4, 8


@dataclass(frozen=True, slots=True)
class SizeSettings:
    """What is planned.

    Attributes:
        inputs: variables that the map reads, beside the source's keys and values of all layers.
        outputs: variables that it makes.
        tokens: of the fit split.
        held_out: tokens of the held-out split, as a share of those.
        block: tokens per block.
        sketch: principal directions per source layer; `None` for no sketch.
        memory_gb: for the sums, in 10⁹ bytes; `None` for one pass.
        rank: of a shared basis.
        prompt: tokens of a prompt, for the share of its prefill.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("target.keys", "target.values")
    tokens: int = 122_880
    held_out: float = 0.1
    block: int = 512
    sketch: int | None = None
    memory_gb: float | None = None
    rank: int = 1024
    prompt: int = 4096


@dataclass(frozen=True, slots=True)
class CalibrationSizes:
    """Bytes and operations of one calibration and of the maps that come of it.

    Attributes:
        source: the small model.
        target: the large model.
        settings: what is planned.
        staged_per_token: staged bytes per token.
        staged: staged bytes in all.
        features: inputs of the fit, after a sketch.
        inputs: inputs of the map, which reads the states themselves.
        outputs: numbers that the map makes per token.
        gram: bytes of the inputs' products with one another, both splits.
        cross: bytes of their products with the outputs, both splits.
        passes: passes over the staged states.
        peaks: bytes in memory per stage, with one model resident where one is.
        joint_flops: operations per token of a full-rank map.
        joint_bytes: its weights in bf16.
        basis_flops: operations per token of a shared basis of the planned rank.
        basis_bytes: its weights in bf16.
        joint_share: operations of the full-rank map as a share of the target's prefill of the prompt.
        basis_share: those of the shared basis.
    """

    source: ModelShape
    target: ModelShape
    settings: SizeSettings
    staged_per_token: int
    staged: int
    features: int
    inputs: int
    outputs: int
    gram: int
    cross: int
    passes: int
    peaks: dict[str, int]
    joint_flops: int
    joint_bytes: int
    basis_flops: int
    basis_bytes: int
    joint_share: float
    basis_share: float

    @property
    def rows_per_feature(self) -> float:
        return self.settings.tokens / self.features

    def fits(self, memory_gb: float | int) -> bool:
        """Whether every stage stays within so many 10⁹ bytes."""
        return max(self.peaks.values()) <= memory_gb * 1e9


def _layer_widths(source: ModelShape, target: ModelShape, settings: SizeSettings) -> dict[str, int]:
    both = 2 * source.kv_width
    kept = both if settings.sketch is None else min(settings.sketch, both)
    widths = dict.fromkeys(KNOWN, target.hidden)
    widths |= dict.fromkeys(("target.keys", "target.values"), target.kv_width)
    return widths | dict.fromkeys(SKETCHED, source.kv_width) | {SKETCH: kept}


def _width(names: Iterable[str], widths: dict[str, int], layers: dict[str, int]) -> int:
    """Numbers in one row of some variables.

    Raises:
        UsageError: a variable is none.
    """
    extents = [Extent.of(name, layers) for name in names]
    unknown = [extent.variable for extent in extents if extent.variable not in layers]
    if unknown:
        raise UsageError(f"{unknown[0]} is no variable of a map; expected one of {', '.join(KNOWN)}.")
    return sum(len(extent) * widths[extent.variable] for extent in extents)


def _passes(
    blocks: frozenset[MomentBlock], widths: dict[str, int], layers: dict[str, int], settings: SizeSettings
) -> tuple[int, int]:
    """How many passes there are, and the bytes of the largest one's sums."""
    memory = None if settings.memory_gb is None else settings.memory_gb * 1e9
    sets = 2 if settings.held_out else 1
    whole = {name: _width([name], widths, layers) for block in blocks for name in block}
    passes = plan_passes(blocks, whole, layers, sets, memory)
    return len(passes), max(
        sum(_width([a], widths, layers) * _width([b], widths, layers) for a, b in part) * SUM_BYTES * sets
        for part in passes
    )


def calibration_sizes(source: ModelShape, target: ModelShape, settings: SizeSettings) -> CalibrationSizes:
    """Compute all sizes of a joint map of the source's keys and values and what the target knows natively.

    Raises:
        UsageError: a variable is none, or the memory does not suffice for one layer.
    """
    layers = {name: (source if name.startswith("source.") else target).layers for name in KNOWN}
    widths = _layer_widths(source, target, settings)
    inputs = (*SKETCHED, *settings.inputs)
    blocks = joint_blocks(inputs, settings.outputs)
    features = inputs if settings.sketch is None else (SKETCH, *settings.inputs)
    p, raw, q = (_width(names, widths, layers) for names in (features, inputs, settings.outputs))
    passes, sums = _passes(blocks if settings.sketch is None else sketched(blocks), widths, layers, settings)
    streams = residual_layers((*settings.inputs, *settings.outputs), layers)
    source_token = 2 * source.layers * source.kv_width * HALF
    target_token = (2 * target.layers * target.kv_width + len(streams) * target.hidden) * HALF
    sets = 2 if settings.held_out else 1
    total = round(settings.tokens * (1 + settings.held_out))
    prefill = target.cost().prefill(settings.prompt)
    width = p + max(q // passes, 1)
    held = rows_per_product(width) * width * (SINGLE + DOUBLE)
    sketch = 3 * source.layers * source.kv_width**2 * DOUBLE * sets
    peaks = {
        "stage source": source.parameters * HALF + settings.block * source_token * (1 + SINGLE // HALF),
        "stage target": target.parameters * HALF + settings.block * target_token * (1 + SINGLE // HALF),
        **({"sketch": sketch} if settings.sketch else {}),
        "sum": sums + held,
        "fit": 3 * p * p * DOUBLE + 2 * p * target.kv_width * DOUBLE,
    }
    return CalibrationSizes(
        source=source,
        target=target,
        settings=settings,
        staged_per_token=source_token + target_token,
        staged=total * (source_token + target_token),
        features=p,
        inputs=raw,
        outputs=q,
        gram=p * p * DOUBLE * sets,
        cross=p * q * DOUBLE * sets,
        passes=passes,
        peaks=peaks,
        joint_flops=2 * raw * q,
        joint_bytes=raw * q * HALF,
        basis_flops=2 * settings.rank * (raw + q),
        basis_bytes=settings.rank * (raw + q) * HALF,
        joint_share=2 * raw * q * settings.prompt / prefill,
        basis_share=2 * settings.rank * (raw + q) * settings.prompt / prefill,
    )


def _amount(size: float | int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def sizes_table(sizes: CalibrationSizes) -> Table:
    """A table for a person."""
    settings = sizes.settings
    table = Table(title=f"{sizes.source.name} → {sizes.target.name}, {settings.tokens:,} tokens")
    table.add_column("what")
    table.add_column("size", justify="right")
    for name, value in (
        ("staged states per token", _amount(sizes.staged_per_token)),
        ("staged states, both splits", _amount(sizes.staged)),
        ("inputs of the map", f"{sizes.inputs:,}"),
        ("features of the fit" + (f" (sketch {settings.sketch})" if settings.sketch else ""), f"{sizes.features:,}"),
        ("rows per feature", f"{sizes.rows_per_feature:.1f}"),
        ("outputs", f"{sizes.outputs:,}"),
        ("gram, both splits", _amount(sizes.gram)),
        ("cross products, both splits", _amount(sizes.cross)),
        ("passes over the staged states", str(sizes.passes)),
        *((f"peak memory: {stage}", _amount(peak)) for stage, peak in sizes.peaks.items()),
        ("full-rank map, bf16", _amount(sizes.joint_bytes)),
        (f"full-rank map, share of a prefill of {settings.prompt:,}", f"{100 * sizes.joint_share:.1f} %"),
        (f"shared basis of rank {settings.rank:,}, bf16", _amount(sizes.basis_bytes)),
        (f"shared basis, share of a prefill of {settings.prompt:,}", f"{100 * sizes.basis_share:.1f} %"),
    ):
        table.add_row(name, value)
    return table
