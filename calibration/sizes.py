"""How large a calibration and its map will be, before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.table import Table

from kvbridge.calibration.moments import rows_per_product
from kvbridge.calibration.passes import SUM_BYTES, pass_variables, plan_passes
from kvbridge.calibration.products import SKETCH, Extent, MomentBlock, joint_blocks, plain_blocks
from kvbridge.calibration.rows import layer_counts, layer_widths, residual_layers, variables_of, widths_of
from kvbridge.calibration.shapes import ModelShape
from kvbridge.calibration.sketch import SKETCHED, sketched
from kvbridge.calibration.staging import token_bytes
from kvbridge.disk import amount

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
        memory_gb: for the sums of one pass, in 10⁹ bytes; `None` for one pass.
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

    @property
    def sets(self) -> int:
        """Sets of moments whose sums are in memory at once; those of first positions are few rows."""
        return 2 if self.held_out else 1


@dataclass(frozen=True, slots=True)
class FitShape:
    """What the memory of a fit depends on, beside the mapper.

    Attributes:
        features: of the regression, after a sketch.
        inputs: numbers that the map reads.
        outputs: widths of what it makes, one for each layer and kind.
    """

    features: int
    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MapSize:
    """What a map takes.

    Attributes:
        flops: operations per token.
        bytes: its weights in bf16.
        share: its operations as a share of the target's prefill of the planned prompt.
    """

    flops: int
    bytes: int
    share: float

    @classmethod
    def of(cls, weights: int, target: ModelShape, prompt: int) -> MapSize:
        return cls(2 * weights, weights * HALF, 2 * weights * prompt / target.cost().prefill(prompt))


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
        joint: a full-rank map.
        basis: a shared basis of the planned rank.
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
    joint: MapSize
    basis: MapSize

    @property
    def rows_per_feature(self) -> float:
        return self.settings.tokens / self.features

    def fits(self, memory_gb: float | int) -> bool:
        """Whether every stage stays within so many 10⁹ bytes."""
        return max(self.peaks.values()) <= memory_gb * 1e9


def _passes(
    blocks: frozenset[MomentBlock], source: ModelShape, target: ModelShape, settings: SizeSettings
) -> tuple[int, int]:
    """How many passes there are, and the bytes in memory in the largest one."""
    layers = layer_counts(source, target)

    def widths(names: Iterable[str]) -> dict[str, int]:
        return widths_of(names, source, target, settings.sketch)

    wide = widths(variables_of(blocks))
    rows = rows_per_product(sum(wide.values()))
    passes = plan_passes(blocks, wide, layers, settings.sets, settings.memory_gb)
    held = [widths(pass_variables(part, passes, layers)) for part in passes]
    return len(passes), max(summing_bytes(*each, rows, settings.sets) for each in zip(passes, held, strict=True))


def summing_bytes(blocks: frozenset[MomentBlock], widths: dict[str, int], rows: int, sets: int) -> int:
    """Sums, the largest product that is added to them, and rows: waiting, joined and centred, of one variable in fp64.

    Args:
        blocks: products of a pass.
        widths: of its variables.
        rows: that wait for one product.
        sets: of sums.
    """
    products = [widths[a] * widths[b] for a, b in blocks]
    waiting = 3 * SINGLE * sum(widths.values()) + 2 * DOUBLE * max(widths.values())
    return sum(products) * SUM_BYTES * sets + max(products) * SINGLE + rows * waiting


def _each_output(names: tuple[str, ...], source: ModelShape, target: ModelShape) -> tuple[int, ...]:
    """Width of every layer of every output."""
    extents = [Extent.of(name, layer_counts(source, target)) for name in names]
    one = layer_widths(source, target)
    return tuple(one[extent.variable] for extent in extents for _ in range(len(extent)))


def calibration_sizes(
    source: ModelShape,
    target: ModelShape,
    settings: SizeSettings,
    fit_bytes: Callable[[FitShape], int] | None = None,
) -> CalibrationSizes:
    """Compute all sizes of a joint map of the source's keys and values and what the target knows natively.

    Args:
        source: the small model.
        target: the large model.
        settings: what is planned.
        fit_bytes: bytes that the mapper's fit holds at most, beside moments in their file; without it the sizes say
            nothing of the fit.

    Raises:
        UsageError: a variable is none, or the memory does not suffice for one layer.
    """
    layers = layer_counts(source, target)
    inputs = (*SKETCHED, *settings.inputs)
    blocks = plain_blocks(joint_blocks(inputs, settings.outputs), layers)
    passes, summing = _passes(blocks if settings.sketch is None else sketched(blocks), source, target, settings)
    features = inputs if settings.sketch is None else (SKETCH, *settings.inputs)
    p, raw, q = (
        sum(widths_of(names, source, target, settings.sketch).values())
        for names in (features, inputs, settings.outputs)
    )
    streams = residual_layers((*settings.inputs, *settings.outputs), layers)
    source_token, target_token = (
        token_bytes(model, torch.bfloat16, kept) for model, kept in ((source, 0), (target, len(streams)))
    )
    sketch = 3 * source.layers * source.kv_width**2 * DOUBLE * settings.sets
    peaks = {
        "stage source": source.parameters * HALF + settings.block * source_token * (1 + SINGLE // HALF),
        "stage target": target.parameters * HALF + settings.block * target_token * (1 + SINGLE // HALF),
        **({"sketch": sketch} if settings.sketch else {}),
        "sum": summing,
    }
    if fit_bytes is not None:
        peaks["fit"] = fit_bytes(FitShape(p, raw, _each_output(settings.outputs, source, target)))
    return CalibrationSizes(
        source=source,
        target=target,
        settings=settings,
        staged_per_token=source_token + target_token,
        staged=round(settings.tokens * (1 + settings.held_out)) * (source_token + target_token),
        features=p,
        inputs=raw,
        outputs=q,
        gram=p * p * DOUBLE * settings.sets,
        cross=p * q * DOUBLE * settings.sets,
        passes=passes,
        peaks=peaks,
        joint=MapSize.of(raw * q, target, settings.prompt),
        basis=MapSize.of(settings.rank * (raw + q), target, settings.prompt),
    )


def sizes_table(sizes: CalibrationSizes) -> Table:
    """A table for a person."""
    settings = sizes.settings
    table = Table(title=f"{sizes.source.name} → {sizes.target.name}, {settings.tokens:,} tokens")
    table.add_column("what")
    table.add_column("size", justify="right")
    for name, value in (
        ("staged states per token", amount(sizes.staged_per_token)),
        ("staged states, both splits", amount(sizes.staged)),
        ("inputs of the map", f"{sizes.inputs:,}"),
        ("features of the fit" + (f" (sketch {settings.sketch})" if settings.sketch else ""), f"{sizes.features:,}"),
        ("rows per feature", f"{sizes.rows_per_feature:.1f}"),
        ("outputs", f"{sizes.outputs:,}"),
        ("gram, both splits", amount(sizes.gram)),
        ("cross products, both splits", amount(sizes.cross)),
        ("passes over the staged states", str(sizes.passes)),
        *((f"peak memory: {stage}", amount(peak)) for stage, peak in sizes.peaks.items()),
        ("full-rank map, bf16", amount(sizes.joint.bytes)),
        (f"full-rank map, share of a prefill of {settings.prompt:,}", f"{100 * sizes.joint.share:.1f} %"),
        (f"shared basis of rank {settings.rank:,}, bf16", amount(sizes.basis.bytes)),
        (f"shared basis, share of a prefill of {settings.prompt:,}", f"{100 * sizes.basis.share:.1f} %"),
    ):
        table.add_row(name, value)
    return table
