"""Moments by way of staged states: each model reads the text alone, then the states are summed, in passes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from kvbridge.calibration.archive import CalibrationMoments, load_same, side_by_side
from kvbridge.calibration.attention import AttentionMetric
from kvbridge.calibration.blocks import SPLITS, BlockSet
from kvbridge.calibration.config import CalibrationConfig
from kvbridge.calibration.moments import rows_per_product
from kvbridge.calibration.passes import pass_variables, plan_passes
from kvbridge.calibration.products import SKETCH, MomentBlock, joint_blocks
from kvbridge.calibration.request import Request
from kvbridge.calibration.rows import residual_layers, variables_of
from kvbridge.calibration.sketch import SKETCHED, Sketch, principal_directions
from kvbridge.calibration.staging import StagedStates, stage_model
from kvbridge.calibration.sums import FIRST_POSITIONS, Summation, Wanted
from kvbridge.calibration.tensorfile import TensorFile, damaged, write_tensors
from kvbridge.fingerprint import digest
from kvbridge.model import let_go
from kvbridge.pair import ROLES, Pair
from kvbridge.variables import Span


@dataclass(frozen=True, slots=True)
class StagedPair:
    """Staged states of both models.

    Attributes:
        source: of the source.
        target: of the target.
        drawn: the blocks.
        pairing: which of the target's blocks goes with one of the source's.
        sketch: what stands for the source's keys and values, if anything does.
    """

    source: StagedStates
    target: StagedStates
    drawn: BlockSet
    pairing: str
    sketch: Sketch | None = None

    @classmethod
    def under(cls, folder: Path, drawn: BlockSet, pairing: str) -> StagedPair:
        source, target = (StagedStates(folder / role, role) for role in ROLES)
        return cls(source, target, drawn, pairing)

    def read(self, numbers: list[int]) -> dict[str, Float[Tensor, "B T p"]]:
        """States of both models, as they were staged, and the source's sketch."""
        read = self.source.read(numbers)
        stands = {} if self.sketch is None else {SKETCH: self.sketch.rows(read)}
        return read | stands | self.target.read(self.drawn.partners(numbers, self.pairing))

    def stage(self, pair: Pair, numbers: list[int], residuals: tuple[int, ...], batch: int) -> None:
        """Stage what is missing, one model after the other."""
        let_go()
        stage_model(pair, self.drawn, numbers, self.source, (), batch)
        let_go()
        partners = sorted(self.drawn.partners(numbers, self.pairing))
        stage_model(pair, self.drawn, partners, self.target, residuals, batch)
        let_go()

    def remove(self) -> None:
        folder = self.source.folder.parent
        self.source.remove()
        self.target.remove()
        # A folder of the user's own may hold other things.
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def staging_folder(config: CalibrationConfig, path: Path) -> Path:
    """Where the states of the moments file `path` are staged; shards have folders of their own."""
    shard = path.name.partition("-")[2].removesuffix(".safetensors")
    name = f"staged-{shard}" if shard else "staged"
    return path.parent / name if config.stage is True else Path(str(config.stage)).expanduser() / (shard and name)


def sets_summed(drawn: BlockSet, batches: list[list[int]], enough: int) -> int:
    """How many sets of moments need memory for their sums; first positions stay rows where they are not `enough`."""
    counts = [sum(len(batch) for batch in batches if drawn.split[batch[0]] == split) for split in range(len(SPLITS))]
    return sum((count > 0) + (count * FIRST_POSITIONS >= enough) for count in counts)


def find_sketch(request: Request, states: StagedPair, batches: list[list[int]], kept: int, path: Path) -> Sketch:
    """The sketch of staged source states, kept in the file `path` so that a resumed run goes on with the same one.

    Args:
        request: the moments that it is for.
        states: what was staged.
        batches: block numbers.
        kept: directions of each layer.
        path: of the sketch.

    Raises:
        CalibrationError: the file is damaged.
    """
    if not path.exists():
        depth = request.layers[SKETCH]
        by_layer = [[str(Span(name, layer, layer + 1)) for name in SKETCHED] for layer in range(depth)]
        blocks = frozenset[MomentBlock]().union(*(joint_blocks(names, []) for names in by_layer))
        widths = request.widths(name for names in by_layer for name in names)
        wanted = Wanted(blocks, widths, request.layers, request.identity)
        at = path.with_name(f"{path.name}.sums")
        fit = [batch for batch in batches if states.drawn.split[batch[0]] == SPLITS.index("fit")]
        moments = Summation(states.source, states.drawn, request.config, wanted, at).run(fit, "sketch")
        directions = principal_directions(moments.sets["fit", "rest"], depth, kept)
        write_tensors(path, {"directions": directions.float()}, {})
        at.unlink()
    try:
        return Sketch(TensorFile(path).read("directions").clone())
    except (SafetensorError, ValueError) as error:
        raise damaged(path, error) from error


def collect_staged(
    request: Request, drawn: BlockSet, batches: list[list[int]], path: Path, attention: AttentionMetric | None = None
) -> CalibrationMoments:
    """Stage what is missing, sum it in as few passes as the memory allows, and write the file `path`.

    Args:
        request: what is asked for.
        drawn: the blocks.
        batches: numbers of those that are summed.
        path: of the moments.
        attention: what is kept beside the sums.

    Raises:
        CalibrationError: states, a pass or a checkpoint of other settings are in the way.
        UsageError: the memory does not suffice for one layer.
    """
    started = time.monotonic()
    config, layers = request.config, request.layers
    variables = variables_of(request.blocks)
    widths = request.widths(variables)
    enough = rows_per_product(sum(widths.values()))
    passes = plan_passes(request.blocks, widths, layers, sets_summed(drawn, batches, enough), config.memory_gb)
    states = StagedPair.under(staging_folder(config, path), drawn, config.pairing)
    numbers = [number for batch in batches for number in batch]
    states.stage(request.pair, numbers, residual_layers(variables, layers), config.batch)
    kept = path.with_name(f"{path.name}.sketch")
    if config.sketch is not None:
        states = replace(states, sketch=find_sketch(request, states, batches, config.sketch, kept))
    found = []
    for number, part in enumerate(passes, start=1):
        at = path if len(passes) == 1 else path.with_name(f"{path.name}.pass-{digest(sorted(part))}")
        if not at.exists():
            names = pass_variables(part, passes, layers)
            wanted = Wanted(part, request.widths(names), layers, request.identity, enough, attention)
            Summation(states, drawn, config, wanted, at).run(batches, f"sum {number}/{len(passes)}")
        found.append(load_same(at, request.identity))
    joined = side_by_side(found)
    joined.sketch = states.sketch
    joined.info["seconds"] = max(joined.info["seconds"], time.monotonic() - started)
    joined.save(path)
    for leftover in (kept, *path.parent.glob(f"{path.name}.pass-*")):
        leftover.unlink(missing_ok=True)
    if not config.keep_staged:
        states.remove()
    return CalibrationMoments.load(path)
