"""Stream blocks through both models into moments, at once or by way of staged states; resumable and shardable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.added import added_moments, identity_with
from kvbridge.calibration.archive import MOMENTS, CalibrationMoments
from kvbridge.calibration.blocks import BlockSet
from kvbridge.calibration.config import CalibrationConfig, identity, require_same
from kvbridge.calibration.draw import Draw
from kvbridge.calibration.moments import rows_per_product
from kvbridge.calibration.products import MomentBlock, plain_blocks
from kvbridge.calibration.rows import layer_counts, read_states, residual_layers, variables_of, widths_of
from kvbridge.calibration.shards import finished_shards, merge_shards, parse_shard, shard_path
from kvbridge.calibration.staged import collect_staged
from kvbridge.calibration.sums import Summation, Wanted, batches_of
from kvbridge.errors import UsageError
from kvbridge.pair import Pair, require_length
from kvbridge.processes import alone, process_state


@dataclass(frozen=True, slots=True)
class _LiveStates:
    """States that both models compute when they are asked for."""

    pair: Pair
    drawn: BlockSet
    pairing: str
    residuals: tuple[int, ...]

    def read(self, numbers: list[int]) -> dict[str, Float[Tensor, "B T p"]]:
        other = [self.drawn.partner(number, self.pairing) for number in numbers]
        return read_states(self.pair.load("source"), "source", self.drawn.batch(numbers)) | read_states(
            self.pair.load("target"), "target", self.drawn.batch(other), self.residuals
        )


def _collect(
    pair: Pair,
    config: CalibrationConfig,
    blocks: frozenset[MomentBlock],
    added: CalibrationMoments | None,
    path: Path,
    shard: int,
    shards: int,
) -> CalibrationMoments:
    """Collect one shard into the file `path`, of documents that `added` has not seen."""
    corpus = config.open("calibration")
    draw = Draw.wanted(config, None if added is None else added.info["identity"])
    drawn = draw.parts(corpus, pair.tokenizer)[-1]
    batches = batches_of(drawn, config.batch, shard, shards)
    geometries = pair.geometry("source"), pair.geometry("target")
    layers, variables = layer_counts(*geometries), variables_of(blocks)
    if config.sketch is not None and shards > 1:
        raise UsageError("calibration.sketch needs all states in one place; start one process.")
    if config.stage:
        return collect_staged(pair, config, corpus, blocks, added, drawn, batches, path)
    states = _LiveStates(pair, drawn, config.pairing, residual_layers(variables, layers))
    whole = identity_with(identity(pair, corpus, config, blocks), added)
    widths = widths_of(variables, *geometries)
    wanted = Wanted(blocks, widths, layers, whole, rows_per_product(sum(widths.values())))
    label = "calibrate" if shards == 1 else f"calibrate {shard}/{shards}"
    return Summation(states, drawn, config, wanted, path).run(batches, label)


def calibrate(
    pair: Pair, config: CalibrationConfig, blocks: frozenset[MomentBlock], out: Path
) -> CalibrationMoments | None:
    """Collect the moments of a pair, or finish, merge or reuse what `out` holds.

    A killed run goes on where its last checkpoint was and ends with the same bits. Under `accelerate launch` every
    process collects its share and the first one merges. With `config.stage` each model is read alone and its states
    are left on disk until they are summed; a `PairLoader` then never has both models in memory. With `config.add` the
    sums of finished moments are added at the end, which need no text to be read twice.

    Args:
        pair: source and target; a `PairLoader` only where states are staged.
        config: text and sizes.
        blocks: products of variables to gather, as the mapper asks for.
        out: folder for the moments' file and, on the way, checkpoints, shards and staged states.

    Returns:
        The moments; `None` on a process that only contributed a shard.

    Raises:
        UsageError, CorpusError: settings or text that cannot work, or another process collects the same file.
        CalibrationError: `out` holds moments of other settings, or those to be added are of another pair, text or
            mapper.
    """
    require_length(pair, config.block, "calibration.block")
    blocks = plain_blocks(blocks, layer_counts(pair.geometry("source"), pair.geometry("target")))

    def own() -> dict[str, Any]:
        # Of a pair whose models are loaded one at a time this loads both, so it is asked for when it is needed.
        return identity(pair, config.open("calibration"), config, blocks)

    added = None if config.add is None else added_moments(config.add, own())

    def whole() -> dict[str, Any]:
        return identity_with(own(), added)

    final = out / MOMENTS
    if final.exists():
        return _reused(final, whole())
    state = process_state()
    shard, shards = parse_shard(config.shard, state.process_index, state.num_processes)
    finished = finished_shards(out) if config.shard is None and shards == 1 else 0
    # No process may merge, and so delete shards, before all have looked.
    state.wait_for_everyone()
    if not finished:
        path = final if shards == 1 and added is None else shard_path(out, shard, shards)
        if path.exists():
            _reused(path, whole())
        else:
            with alone(path, main=True):
                moments = _collect(pair, config, blocks, added, path, shard, shards)
            if path == final:
                return moments
        if config.shard is not None:
            return None
        state.wait_for_everyone()
    if not state.is_main_process:
        return None
    return merge_shards(out, whole(), finished or shards, final, added)


def _reused(path: Path, wanted: dict[str, Any]) -> CalibrationMoments:
    moments = CalibrationMoments.load(path)
    require_same(moments.info["identity"], wanted, path)
    return moments
