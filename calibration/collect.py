"""Stream blocks through both models into moments, at once or by way of staged states; resumable and shardable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.archive import MOMENTS, CalibrationMoments, load_same
from kvbridge.calibration.blocks import BlockSet
from kvbridge.calibration.config import CalibrationConfig
from kvbridge.calibration.products import MomentBlock
from kvbridge.calibration.queries import find_metric, metric_file
from kvbridge.calibration.request import Request
from kvbridge.calibration.rows import read_states, residual_layers, variables_of
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
        other = self.drawn.partners(numbers, self.pairing)
        return read_states(self.pair.load("source"), "source", self.drawn.batch(numbers)) | read_states(
            self.pair.load("target"), "target", self.drawn.batch(other), self.residuals
        )


def _collect(request: Request, path: Path, shard: int, shards: int) -> CalibrationMoments:
    """Collect one shard into the file `path`."""
    pair, config = request.pair, request.config
    if config.sketch is not None and shards > 1:
        raise UsageError("calibration.sketch needs all states in one place; start one process.")
    drawn = request.draw.blocks(request.corpus, pair.tokenizer)
    batches = batches_of(drawn, config.batch, shard, shards)
    attention = find_metric(request, drawn, path)
    if config.stage:
        return collect_staged(request, drawn, batches, path, attention)
    names = variables_of(request.blocks)
    states = _LiveStates(pair, drawn, config.pairing, residual_layers(names, request.layers))
    wanted = Wanted(request.blocks, request.widths(names), request.layers, request.identity, attention=attention)
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
    request = Request.of(pair, config, blocks)
    final = out / MOMENTS
    if final.exists():
        return load_same(final, request.identity)
    state = process_state()
    shard, shards = parse_shard(config.shard, state.process_index, state.num_processes)
    finished = finished_shards(out) if config.shard is None and shards == 1 else 0
    # No process may merge, and so delete shards, before all have looked.
    state.wait_for_everyone()
    if not finished:
        path = final if shards == 1 and request.added is None else shard_path(out, shard, shards)
        if path.exists():
            load_same(path, request.identity)
        else:
            with alone(path, main=True):
                moments = _collect(request, path, shard, shards)
                metric_file(path).unlink(missing_ok=True)
            if path == final:
                return moments
        if config.shard is not None:
            return None
        state.wait_for_everyone()
    if not state.is_main_process:
        return None
    return merge_shards(out, request.identity, finished or shards, final, request.added)
