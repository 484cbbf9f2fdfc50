"""Sum moments over batches of blocks, from wherever their states come; resumable, with bounded memory."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from kvbridge.calibration.archive import CalibrationMoments, load_same
from kvbridge.calibration.attention import AttentionMetric
from kvbridge.calibration.blocks import SPLITS, BlockSet
from kvbridge.calibration.config import PRECISIONS, CalibrationConfig
from kvbridge.calibration.moments import PARTS, Moments
from kvbridge.calibration.products import MomentBlock
from kvbridge.calibration.rows import cut_rows

# Outlier norms sit on the first one to four tokens; their moments are kept apart so that a fit may leave them out.
FIRST_POSITIONS = 4


@runtime_checkable
class States(Protocol):
    """Where the states of blocks come from: the models themselves, or what was staged."""

    def read(self, numbers: list[int]) -> dict[str, Float[Tensor, "B T p"]]:
        """States of both models, one row per token, as `read_states` gives them."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is summed.

    Attributes:
        blocks: products.
        widths: variables, and how wide their rows are.
        layers: how many layers each variable has.
        identity: what decides the values.
        enough: rows that wait for one product, the same for all passes over the same states; by default as many as
            the widths let wait.
        attention: what is kept beside the sums.
    """

    blocks: frozenset[MomentBlock]
    widths: dict[str, int]
    layers: dict[str, int]
    identity: dict[str, Any]
    enough: int | None = None
    attention: AttentionMetric | None = None

    def zeros(self) -> CalibrationMoments:
        sets = {
            (split, part): Moments.zeros(self.widths, self.blocks, self.layers) for split in SPLITS for part in PARTS
        }
        return CalibrationMoments(sets, {"identity": self.identity}, attention=self.attention)


def batches_of(drawn: BlockSet, batch: int, shard: int, shards: int) -> list[list[int]]:
    """Block numbers of each batch; all blocks of one batch belong to one split."""
    batches = []
    for split in range(len(SPLITS)):
        mine = [number for number in range(shard, len(drawn), shards) if drawn.split[number] == split]
        batches += [mine[at : at + batch] for at in range(0, len(mine), batch)]
    return batches


class Summation:
    """Sums what is wanted into one file, which is checkpointed on the way."""

    def __init__(self, states: States, drawn: BlockSet, config: CalibrationConfig, wanted: Wanted, path: Path) -> None:
        self.states, self.drawn, self.config, self.wanted, self.path = states, drawn, config, wanted, path
        self.checkpoint = path.with_name(path.name + ".progress")
        self.precision = PRECISIONS[config.precision]

    def run(self, batches: list[list[int]], label: str) -> CalibrationMoments:
        """Sum all batches, or those that a killed run left, and write the file.

        Raises:
            CalibrationError: the checkpoint is of other settings.
        """
        moments = self._resume()
        finished = moments.info.pop("batches", 0)
        before, info = moments.info.get("seconds", 0.0), moments.info
        started = saved = time.monotonic()
        tokens, done = self.config.block, 0
        total, initial = (sum(map(len, part)) * tokens for part in (batches, batches[:finished]))
        with tqdm(total=total, initial=initial, unit="tok", unit_scale=True, desc=label) as bar:
            for number, batch in enumerate(batches[finished:], start=finished + 1):
                self._add(moments, batch)
                done += len(batch) * tokens
                bar.update(len(batch) * tokens)
                if time.monotonic() - saved > self.config.checkpoint_seconds:
                    info["seconds"] = before + time.monotonic() - started
                    CalibrationMoments(moments.sets, info | {"batches": number}).save(self.checkpoint)
                    saved = time.monotonic()
        # The few rows of first positions are kept as they are, where products would be larger.
        for split in SPLITS:
            moments.sets[split, "rest"].settle(self.precision)
        info["seconds"] = before + time.monotonic() - started
        info["documents"] = self.drawn.documents
        info["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        info["tokens_per_second"] = done / max(time.monotonic() - started, 1e-9)
        moments.save(self.path)
        self.checkpoint.unlink(missing_ok=True)
        return moments

    def _add(self, moments: CalibrationMoments, batch: list[int]) -> None:
        split = SPLITS[self.drawn.split[batch[0]]]
        read = self.states.read(batch)
        layers = self.wanted.layers
        for part, tokens in zip(PARTS, (slice(0, FIRST_POSITIONS), slice(FIRST_POSITIONS, None)), strict=True):
            kept = {name: states[:, tokens] for name, states in read.items()}
            rows = {name: cut_rows(kept, name, layers[name.partition("[")[0]]) for name in self.wanted.widths}
            moments.sets[split, part].hold(rows, self.precision, self.wanted.enough)

    def _resume(self) -> CalibrationMoments:
        if not self.checkpoint.exists():
            return self.wanted.zeros()
        moments = load_same(self.checkpoint, self.wanted.identity).clone()
        moments.attention = self.wanted.attention
        return moments
