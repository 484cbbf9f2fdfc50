"""Which products are summed together, so that the sums fit into memory: passes over target layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbridge.calibration.moments import CACHE_VARIABLES
from kvbridge.calibration.products import Extent, MomentBlock, canonical
from kvbridge.errors import UsageError

SUM_BYTES = 8


def plan_passes(
    blocks: Iterable[MomentBlock],
    widths: Mapping[str, int],
    layers: Mapping[str, int],
    sets: int,
    memory_gb: float | None,
) -> list[frozenset[MomentBlock]]:
    """Cut products into passes whose sums take no more than `memory_gb` each.

    Of two variables the one of more layers is cut. All products with one of its layers are summed in one pass, and
    neighbouring layers are one variable of that pass, such as `target.keys[0:8]`.

    Args:
        blocks: wanted products.
        widths: of every variable's rows.
        layers: how many layers each variable has.
        sets: sets of moments whose sums are in memory at once.
        memory_gb: in 10⁹ bytes; `None` for no limit.

    Raises:
        UsageError: one layer takes more than that.
    """
    wanted = frozenset(blocks)
    if memory_gb is None:
        return [wanted]
    memory = memory_gb * 1e9
    passes: list[list[tuple[Extent, frozenset[str]]]] = []
    room = 0.0
    for extent, inputs in _layers(wanted, layers):
        whole = next(name for block in wanted for name in block if Extent.of(name, layers).covers(extent))
        width = widths[whole] // len(Extent.of(whole, layers))
        needed = SUM_BYTES * sets * width * sum(widths[a] for a in inputs)
        if needed > memory:
            raise UsageError(
                f"calibration.memory_gb={memory_gb:g}: the products with one layer of {extent.variable} alone take "
                f"{needed / 1e9:.3g}; give more, or calibration.sketch for fewer inputs."
            )
        if needed > room:
            passes.append([])
            room = memory
        passes[-1].append((extent, inputs))
        room -= needed
    return [_joined(layers_of_pass, layers) for layers_of_pass in passes]


def _layers(blocks: frozenset[MomentBlock], layers: Mapping[str, int]) -> list[tuple[Extent, frozenset[str]]]:
    """Every single layer of a variable that is cut, and all variables that it is multiplied with."""
    inputs: dict[Extent, set[str]] = {}
    for a, b in sorted(blocks):
        first, second = Extent.of(a, layers), Extent.of(b, layers)
        cut, whole = (second, a) if len(second) >= len(first) else (first, b)
        for layer in range(cut.start, cut.stop):
            inputs.setdefault(Extent(cut.variable, layer, layer + 1), set()).add(whole)
    return [(extent, frozenset(names)) for extent, names in inputs.items()]


def _joined(singles: list[tuple[Extent, frozenset[str]]], layers: Mapping[str, int]) -> frozenset[MomentBlock]:
    """Blocks of one pass, neighbouring layers with the same inputs as one variable."""
    merged: list[tuple[Extent, frozenset[str]]] = []
    for extent, inputs in singles:
        if merged:
            last, same = merged[-1]
            if same == inputs and last.variable == extent.variable and last.stop == extent.start:
                merged[-1] = (Extent(last.variable, last.start, extent.stop), inputs)
                continue
        merged.append((extent, inputs))
    return frozenset(canonical(a, extent.name(layers)) for extent, inputs in merged for a in inputs)


def pass_variables(
    blocks: frozenset[MomentBlock], passes: list[frozenset[MomentBlock]], layers: Mapping[str, int]
) -> list[str]:
    """Variables whose rows one pass needs: those of its blocks and, in the first, what no pass multiplies.

    Means and squares of both caches are gathered whatever a mapper reads.
    """
    own = {name for block in blocks for name in block}
    if blocks != passes[0]:
        return sorted(own)
    if len(passes) == 1:
        return sorted({*own, *CACHE_VARIABLES})
    known = [Extent.of(name, layers) for one in passes for block in one for name in block]
    wholes = [Extent.of(name, layers) for name in CACHE_VARIABLES]
    pieces = [piece for whole in wholes for piece in whole.cut(known)]
    left = {piece.name(layers) for piece in pieces if not any(extent.covers(piece) for extent in known)}
    return sorted(own | left)
