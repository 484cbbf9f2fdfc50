"""All moments of one calibration, and the file they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kvbridge.bridge import Bridge
from kvbridge.calibration.attention import ATTENTION, AttentionMetric
from kvbridge.calibration.blocks import SPLITS
from kvbridge.calibration.config import differing_settings, require_same
from kvbridge.calibration.moments import PARTS, Moments, no_products
from kvbridge.calibration.products import MomentBlock
from kvbridge.calibration.sketch import Sketch, sketched
from kvbridge.calibration.tensorfile import StoredTensors, TensorFile, damaged, write_tensors
from kvbridge.errors import CalibrationError
from kvbridge.pair import Pair, require_identity

MOMENTS = "moments.safetensors"


@dataclass(slots=True)
class CalibrationMoments:
    """All moments of one calibration: per split (`fit`, `held_out`) and part (`first` positions of a block, `rest`).

    Attributes:
        sets: moments by (split, part).
        info: what they were collected from and how; `identity` within it decides what may be resumed or merged.
        sketch: what stands for the source's keys and values in the products, if anything does.
        attention: what the target's attention makes of errors, where it was asked for.
    """

    sets: dict[tuple[str, str], Moments]
    info: dict[str, Any] = field(default_factory=dict)
    sketch: Sketch | None = None
    attention: AttentionMetric | None = None

    def select(self, split: str, *, first: bool) -> Moments:
        """Moments of a split, with or without the first positions of each block."""
        rest = self.sets[split, "rest"]
        if not first:
            return rest
        both = rest.clone()
        both.merge(self.sets[split, "first"])
        both.settle()
        return both

    def require_pair(self, pair: Pair) -> None:
        """Refuse moments of another pair.

        Raises:
            PairMismatchError: naming both fingerprints.
        """
        stored = self.info["identity"].items()
        require_identity(pair, {key.removeprefix("pair."): value for key, value in stored}, "this calibration")

    def require(self, blocks: Iterable[MomentBlock]) -> None:
        """Refuse to go on without what a mapper reads.

        Raises:
            CalibrationError: naming the first thing that was not gathered.
        """
        asked = frozenset(blocks)
        products = asked - {ATTENTION}
        self.sets["fit", "rest"].require(products if self.sketch is None else sketched(products))
        if ATTENTION in asked:
            self.require_attention()

    def require_attention(self) -> AttentionMetric:
        """What the target's attention makes of errors.

        Raises:
            CalibrationError: it was not gathered.
        """
        if self.attention is None:
            raise CalibrationError("these moments hold no metric of attention; calibrate with this mapper.")
        return self.attention

    def merge(self, other: CalibrationMoments) -> None:
        """Add the moments of another shard of the same calibration; the metric of attention stays one's own."""
        for key, moments in self.sets.items():
            moments.merge(other.sets[key])

    def clone(self) -> CalibrationMoments:
        """A copy in memory, which can be added to."""
        return CalibrationMoments(
            {at: moments.clone() for at, moments in self.sets.items()}, dict(self.info), self.sketch, self.attention
        )

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        named = {
            f"{split}/{part}/{key}": value
            for (split, part), moments in self.sets.items()
            for key, value in moments.tensors().items()
        }
        if self.sketch is not None:
            named["sketch"] = self.sketch.directions
        if self.attention is not None:
            named |= self.attention.tensors()
        rows = {f"{split}/{part}": moments.summed for (split, part), moments in self.sets.items()}
        one = self.sets["fit", "rest"]
        described = {"info": self.info, "rows": rows, "layers": one.layers, "blocks": sorted(one.cross)}
        write_tensors(path, named, described)

    @classmethod
    def load(cls, path: Path) -> CalibrationMoments:
        """Open what `save` wrote: means and squares are read at once, products when they are used.

        Raises:
            CalibrationError: the file is missing or is not one of moments.
        """
        if not path.is_file():
            raise CalibrationError(f"{path}: no moments there; run `kvbridge calibrate` first.")
        try:
            file = TensorFile(path)
            loaded = cls({(s, p): _stored(file, f"{s}/{p}") for s in SPLITS for p in PARTS}, file.described("info"))
            if not isinstance(loaded.info.get("identity"), dict):
                raise ValueError("no identity")
            if "sketch" in file.shapes:
                loaded.sketch = Sketch(file.read("sketch").clone())
            loaded.attention = AttentionMetric.stored(file)
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise damaged(path, error) from error
        return loaded


def load_same(path: Path, identity: dict[str, Any]) -> CalibrationMoments:
    """Open moments that must be of the calibration with this identity.

    Raises:
        CalibrationError: the file is missing or damaged, or of other settings.
    """
    moments = CalibrationMoments.load(path)
    require_same(moments.info["identity"], identity, path)
    return moments


def load_of_bridge(folder: Path, bridge: Bridge, named: str) -> CalibrationMoments:
    """Open the moments in a folder, which must be those that a bridge's maps were fitted on.

    A map's units, and what it has seen of a text, are known by its own moments alone.

    Args:
        folder: of the moments.
        bridge: with the maps.
        named: what to call it.

    Raises:
        CalibrationError: the file is missing or damaged, or of another calibration.
    """
    moments = CalibrationMoments.load(folder / MOMENTS)
    known, given = bridge.calibration.get("identity") or {}, moments.info["identity"]
    differing = differing_settings(known, given)
    if differing:
        key = differing[0]
        raise CalibrationError(
            f"{named} was fitted on another calibration than that of {folder}: {', '.join(differing)} differ "
            f"({key} is {known.get(key, 'not set')}, and there {given.get(key, 'not set')}); give the moments that it "
            "was fitted on."
        )
    return moments


def side_by_side(parts: list[CalibrationMoments]) -> CalibrationMoments:
    """Stored moments of different variables over the same rows as one; products stay in their files."""
    sets = {}
    for at, one in parts[0].sets.items():
        others = [part.sets[at] for part in parts]
        mean = {name: value for other in others for name, value in other.mean.items()}
        square = {name: value for other in others for name, value in other.square.items()}
        places = {block: place for other in others for block, place in _places(other.cross).items()}
        held = {name: place for other in others for batch in other.held for name, place in _places(batch).items()}
        widths = {name: len(value) for name, value in mean.items()}
        cross = StoredTensors(places) if one.summed else no_products(widths, (b for o in others for b in o.cross))
        sets[at] = Moments(one.summed, mean, square, cross, dict(one.layers), [StoredTensors(held)] if held else [])
    info = parts[0].info | {"seconds": sum(part.info["seconds"] for part in parts)}
    return CalibrationMoments(sets, info, attention=parts[0].attention)


def _places(stored: Mapping[Any, Any]) -> dict[Any, tuple[TensorFile, str]]:
    return stored.places if isinstance(stored, StoredTensors) else {}


def _stored(file: TensorFile, at: str) -> Moments:
    """The moments of one split and part, their products still in the file.

    Raises:
        ValueError: a part is missing or misshapen.
    """
    names: dict[str, dict[Any, str]] = {"mean": {}, "square": {}, "cross": {}, "held": {}}
    for name in file.shapes:
        if name.startswith(f"{at}/"):
            kind, *variables = name.removeprefix(f"{at}/").split("/")
            names[kind][tuple(variables) if kind == "cross" else variables[0]] = name
    if not names["mean"] or names["mean"].keys() != names["square"].keys():
        raise ValueError(f"{at} lacks a variable")
    widths = {variable: file.shapes[name][0] for variable, name in names["mean"].items()}
    if any(file.shapes[name] != (widths[block[0]], widths[block[1]]) for block, name in names["cross"].items()):
        raise ValueError(f"{at} has a block of another shape")
    held = {variable: file.shapes[name] for variable, name in names["held"].items()}
    count = next(iter(held.values()), (0,))[0]
    if held and held != {variable: (count, width) for variable, width in widths.items()}:
        raise ValueError(f"{at} lacks rows of a variable")
    rows, blocks = file.described("rows")[at], [(a, b) for a, b in file.described("blocks", [])]
    if rows and not names["cross"].keys() >= set(blocks):
        raise ValueError(f"{at} lacks a block")
    return Moments(
        rows,
        {variable: file.read(name).clone() for variable, name in names["mean"].items()},
        {variable: file.read(name).clone() for variable, name in names["square"].items()},
        StoredTensors({block: (file, name) for block, name in names["cross"].items()})
        if rows or not blocks
        else no_products(widths, blocks),
        file.described("layers", {}),
        [StoredTensors({variable: (file, name) for variable, name in names["held"].items()})] if held else [],
    )
