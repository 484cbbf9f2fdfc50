"""Stream blocks through both models into moments; resumable, shardable, with bounded memory."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from kvbridge.calibration.archive import MOMENTS, CalibrationMoments
from kvbridge.calibration.blocks import SPLITS, BlockSet, draw_blocks
from kvbridge.calibration.config import PRECISIONS, CalibrationConfig, identity, require_same
from kvbridge.calibration.moments import PARTS, Moments
from kvbridge.calibration.products import MomentBlock, plain_blocks
from kvbridge.calibration.rows import cut_rows, layer_counts, read_states, residual_layers, variables_of, widths_of
from kvbridge.calibration.shards import finished_shards, merge_shards, parse_shard, shard_path
from kvbridge.pair import ModelPair
from kvbridge.processes import process_state

# Outlier norms sit on the first one to four tokens; their moments are kept apart so that a fit may leave them out.
FIRST_POSITIONS = 4


@dataclass(slots=True)
class _Progress:
    """Moments so far, and how many of this shard's batches they contain."""

    moments: CalibrationMoments
    batches: int


def _next_of_split(drawn: BlockSet, number: int) -> int:
    """The next block of the same split, cyclically: of another document, where each gives one."""
    after = np.roll(drawn.split == drawn.split[number], -number - 1)
    return int((number + 1 + after.argmax()) % len(drawn))


class _Collector:
    """Runs one shard of a calibration and keeps its checkpoint."""

    def __init__(
        self,
        pair: ModelPair,
        config: CalibrationConfig,
        wanted: dict[str, Any],
        blocks: frozenset[MomentBlock],
        path: Path,
    ) -> None:
        self.pair, self.config, self.identity, self.blocks, self.path = pair, config, wanted, blocks, path
        self.checkpoint = path.with_name(path.name + ".progress")
        self.geometries = pair.source.geometry, pair.target.geometry
        self.layers = layer_counts(*self.geometries)
        self.variables = variables_of(blocks)

    def run(self, drawn: BlockSet, shard: int, shards: int) -> CalibrationMoments:
        progress = self._resume()
        batches = self._batches(drawn, shard, shards)
        tokens = self.config.block
        info = progress.moments.info
        before = info.get("seconds", 0.0)
        started = saved = time.monotonic()
        bar = tqdm(
            total=sum(map(len, batches)) * tokens,
            initial=sum(map(len, batches[: progress.batches])) * tokens,
            unit="tok",
            unit_scale=True,
            desc="calibrate" if shards == 1 else f"calibrate {shard}/{shards}",
        )
        done = 0
        with bar:
            for batch in batches[progress.batches :]:
                self._add(progress.moments, drawn, batch)
                progress.batches += 1
                done += len(batch) * tokens
                bar.update(len(batch) * tokens)
                if time.monotonic() - saved > self.config.checkpoint_seconds:
                    self._save_checkpoint(progress, before + time.monotonic() - started)
                    saved = time.monotonic()
        # The few rows of first positions are kept as they are, where products would be larger.
        for split in SPLITS:
            progress.moments.sets[split, "rest"].settle(PRECISIONS[self.config.precision])
        info["seconds"] = before + time.monotonic() - started
        info["documents"] = drawn.documents
        info["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        info["tokens_per_second"] = done / max(time.monotonic() - started, 1e-9)
        return progress.moments

    def finish(self, moments: CalibrationMoments) -> CalibrationMoments:
        moments.save(self.path)
        self.checkpoint.unlink(missing_ok=True)
        return moments

    def _batches(self, drawn: BlockSet, shard: int, shards: int) -> list[list[int]]:
        """Block numbers of each batch; all blocks of one batch belong to one split."""
        batches = []
        for split in range(len(SPLITS)):
            mine = [number for number in range(shard, len(drawn), shards) if drawn.split[number] == split]
            batches += [mine[at : at + self.config.batch] for at in range(0, len(mine), self.config.batch)]
        return batches

    def _add(self, moments: CalibrationMoments, drawn: BlockSet, batch: list[int]) -> None:
        split = SPLITS[drawn.split[batch[0]]]
        other = batch if self.config.pairing == "same" else [_next_of_split(drawn, number) for number in batch]
        read = read_states(self.pair.source, "source", drawn.batch(batch)) | read_states(
            self.pair.target, "target", drawn.batch(other), residual_layers(self.variables, self.layers)
        )
        spans = {"first": slice(0, FIRST_POSITIONS), "rest": slice(FIRST_POSITIONS, self.config.block)}
        for part, tokens in spans.items():
            kept = {name: states[:, tokens] for name, states in read.items()}
            rows = {name: cut_rows(kept, name, self.layers[name.partition("[")[0]]) for name in self.variables}
            moments.sets[split, part].hold(rows, PRECISIONS[self.config.precision])

    def _resume(self) -> _Progress:
        if self.checkpoint.exists():
            moments = CalibrationMoments.load(self.checkpoint).clone()
            require_same(moments.info["identity"], self.identity, self.checkpoint)
            return _Progress(moments, moments.info.pop("batches"))
        widths = widths_of(self.variables, *self.geometries)
        sets = {(split, part): Moments.zeros(widths, self.blocks, self.layers) for split in SPLITS for part in PARTS}
        return _Progress(CalibrationMoments(sets, {"identity": self.identity}), 0)

    def _save_checkpoint(self, progress: _Progress, seconds: float) -> None:
        info = progress.moments.info | {"batches": progress.batches, "seconds": seconds}
        CalibrationMoments(progress.moments.sets, info).save(self.checkpoint)


def calibrate(
    pair: ModelPair, config: CalibrationConfig, blocks: frozenset[MomentBlock], out: Path
) -> CalibrationMoments | None:
    """Collect the moments of a pair, or finish, merge or reuse what `out` holds.

    A killed run goes on where its last checkpoint was and ends with the same bits. Under `accelerate launch` every
    process collects its share and the first one merges.

    Args:
        pair: source and target.
        config: text and sizes.
        blocks: products of variables to gather, as the mapper asks for.
        out: folder for the moments' file and, on the way, checkpoints and shards.

    Returns:
        The moments; `None` on a process that only contributed a shard.

    Raises:
        UsageError, CorpusError: settings or text that cannot work.
        CalibrationError: `out` holds moments of other settings.
    """
    pair.require_length(config.block, "calibration.block")
    blocks = plain_blocks(blocks, layer_counts(pair.source.geometry, pair.target.geometry))
    corpus = config.open("calibration")
    wanted = identity(pair, corpus, config, blocks)
    final = out / MOMENTS
    if final.exists():
        moments = CalibrationMoments.load(final)
        require_same(moments.info["identity"], wanted, final)
        return moments
    state = process_state()
    shard, shards = parse_shard(config.shard, state.process_index, state.num_processes)
    finished = finished_shards(out) if config.shard is None and shards == 1 else 0
    # No process may merge, and so delete shards, before all have looked.
    state.wait_for_everyone()
    if not finished:
        drawn = draw_blocks(
            corpus, pair.tokenizer, tokens=config.tokens, block=config.block, held_out=config.held_out, seed=config.seed
        )
        path = final if shards == 1 else shard_path(out, shard, shards)
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            require_same(CalibrationMoments.load(path).info["identity"], wanted, path)
        else:
            collector = _Collector(pair, config, wanted, blocks, path)
            moments = collector.finish(collector.run(drawn, shard, shards))
            if shards == 1:
                return moments
        if config.shard is not None:
            return None
        state.wait_for_everyone()
    return merge_shards(out, wanted, finished or shards, final) if state.is_main_process else None
