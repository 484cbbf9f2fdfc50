"""How long a hand-off takes beside the prefill that it replaces, with the quality that the same map and plan reach.

native   [ target reads the prompt ]                                   → first logits
cold     [ source reads the prompt ][ head ][ map ][ sinks and tail ]  → first logits
warm                                [ head ][ map ][ sinks and tail ]  → first logits, the source's cache being there
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvbridge.assembly import hand_off, timed
from kvbridge.bridge import Bridge
from kvbridge.errors import CacheError, UsageError
from kvbridge.eval import bench_floor as floor
from kvbridge.eval.arms import read_prompt
from kvbridge.eval.candidates import Candidate
from kvbridge.eval.documents import Document
from kvbridge.eval.points import conditions, score_candidates, summarise_points
from kvbridge.eval.results import peak_memory
from kvbridge.eval.suite import Task
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.kernels import FormMap
from kvbridge.kernels.capability import product_dtype
from kvbridge.kernels.reference import apply_forms
from kvbridge.kernels.steps import measured_steps
from kvbridge.native import compute_head
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import rotated

# Relative error of what a map writes against the reference. In bf16 the cache's own rounding is 2e-3; weights, inputs
# and basis are rounded too, which sums of thousands of cancelling products make up to 4e-2 of a real pair's values; its
# KL differs by 2e-3 then. What is wrong is wrong by more.
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
STEPS = ("head", "map", "inject", "recompute", "scout", "forward")


@dataclass
class BenchConfig:
    """What is timed, and how often.

    Attributes:
        lengths: prompt lengths in tokens.
        repeats: how often each is timed, in turns with the prefills; medians are shown.
        documents: documents of `eval.corpus` on which the same map and plan are scored.
    """

    lengths: list[int] = field(default_factory=lambda: [128, 256, 512])
    repeats: int = 5
    documents: int = 8

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < len(self.lengths) or min(self.lengths, default=0) < 2:
            given = ",".join(map(str, self.lengths))
            raise UsageError(f"bench.lengths=[{given}]: expected prompt lengths of 2 tokens or more, each once.")
        if self.repeats < 1 or self.documents < 1:
            raise UsageError(
                f"bench.repeats={self.repeats}, bench.documents={self.documents}: expected 1 or more of each."
            )


@dataclass(frozen=True, slots=True)
class Bench:
    """A map and a plan on a pair, to be timed.

    Attributes:
        pair: source and target.
        mapping: the map.
        plan: what the target computes natively.
        repeats: how often everything is timed.
    """

    pair: ModelPair
    mapping: FormMap
    plan: HandoffPlan
    repeats: int

    @property
    def layers(self) -> range:
        """The target layers that are mapped."""
        return self.plan.mapped_layers(self.pair.target.geometry.layers)

    @property
    def product_dtype(self) -> torch.dtype:
        """What the map multiplies in here."""
        return product_dtype(self.pair.target.dtype, self.pair.target.device)

    def require_correct(self, prompt: Int[Tensor, "1 P"]) -> dict[str, float]:
        """Compare what the map writes into a cache with the reference.

        Returns:
            The worst layer's relative error, of keys or values, and the limit.

        Raises:
            CacheError: the error is beyond the limit: no time of this map means anything.
        """
        target, layers, limit = self.pair.target, self.layers, LIMITS[self.pair.target.dtype]
        split = self.plan.split(prompt.shape[1])
        cached = self.pair.source.cached(self.pair.source.read(prompt)).span(split.carried_start, split.carried_stop)
        head = compute_head(target, self.plan, prompt)
        native = None if head is None else head.states(target, split.carried_start, split.carried_stop)
        made = apply_forms(self.mapping.forms, cached.content(), layers, native)
        expected = torch.stack(rotated(made, target.geometry, target.rotary, 1, layers))
        written = torch.full_like(expected, torch.nan)
        self.mapping.write(cached, layers, written, target.rotary, native)
        apart, size = ((t.double()).flatten(2).norm(dim=-1) for t in (written - expected, expected))
        error = float((apart / size).max())
        if not error < limit:
            raise CacheError(
                f"what the map writes differs from the reference by {error:.1e}, expected below {limit:.0e}; "
                "nothing is timed. Report this with the bridge's config.json."
            )
        return {"relative_error": error, "limit": limit}

    def time_length(self, prompt: Int[Tensor, "1 P"], copied: float) -> dict[str, Any]:
        """Times at one prompt length, and what the mapping cannot be faster than.

        Args:
            prompt: what is read and handed over.
            copied: bytes per second of a copy.
        """
        rounds = [self._round(prompt) for _ in range(self.repeats + 1)][1:]
        middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
        carried = self.plan.split(prompt.shape[1]).carried
        ratios = {
            f"{kind}_speedup": median(each["native"] / each[kind] for each in rounds) for kind in ("warm", "cold")
        }
        return {
            "carried": carried,
            "seconds": middle,
            **ratios,
            "rounds": rounds,
            "mapping_tokens_per_s": carried / middle["map"],
            "mapping_flops": self.mapping.flops_per_token(self.layers) * carried,
            **self._floor(prompt, middle["map"], carried, copied),
        }

    def _round(self, prompt: Int[Tensor, "1 P"]) -> dict[str, float]:
        """One native reading, one reading by the source, and one hand-off."""
        target, seconds = self.pair.target, dict[str, float]()
        native, source = read_prompt(target, prompt), read_prompt(self.pair.source, prompt)
        with timed(seconds, "warm", target.device), measured_steps() as parts:
            states = self.pair.source.cached(source.cache)
            handoff = hand_off(target, self.plan, self.mapping, states, prompt)
        read = {"native": native.seconds["prefill"], "source": source.seconds["prefill"]}
        cold = read["source"] + seconds["warm"]
        split = {f"map_{part}": spent for part, spent in parts.items() if target.device.type == "cpu"}
        steps = {step: handoff.seconds.get(step, 0.0) for step in STEPS}
        return read | seconds | {"cold": cold} | steps | split

    def _floor(self, prompt: Int[Tensor, "1 P"], spent: float, carried: int, copied: float) -> dict[str, Any]:
        target, packed = self.pair.target, self.mapping.packed(self.product_dtype)
        states = self.pair.source.cached(self.pair.source.read(prompt)).span(0, carried)
        geometry = target.geometry
        shape = (2, len(self.layers), geometry.kv_heads, carried, geometry.head_dim)
        written = torch.empty(shape, dtype=target.dtype, device="meta")
        touched = floor.touched_bytes(packed, self.layers, [*states.keys, *states.values], written)
        plain = floor.plain_product_seconds(packed, self.layers, carried, target.device, self.repeats)
        lowest = max(plain, touched / copied)
        return {
            "plain_product_s": plain,
            "share_of_plain_product": plain / spent,
            "touched_bytes": touched,
            "floor_s": lowest,
            "share_of_floor": lowest / spent,
        }


def _quality(task: Task, bridge: Bridge, name: str, plan: HandoffPlan, taken: list[Document]) -> dict[str, Any]:
    """What the same map and plan reach on some documents, as one point of a bridge."""
    mapping = FormMap.of(bridge, name)
    share = prefill_share(ModelCost.of(task.pair.target), plan, task.config.prompt, mapping)
    tried = [Candidate(name, plan, share)]
    records = score_candidates(task, bridge, tried, taken)
    shared = conditions(task, taken)
    return summarise_points(records, tried, shared, task.config.resamples, task.config.seed)[0]


def run_bench(task: Task, bridge: Bridge, name: str, config: BenchConfig) -> dict[str, Any]:
    """Gate, times at every length, floor and quality; nothing of it where the gate is red.

    Args:
        task: pair, plan and text; its folder holds what is unfinished.
        bridge: whose map is timed.
        name: of the map.
        config: what is timed.

    Raises:
        CacheError: plan and map do not fit each other, or the gate is red.
        UsageError, CorpusError: the text is too short, or the pair cannot read so much.
    """
    pair, longest = task.pair, max(config.lengths)
    pair.require_length(longest, "the longest of bench.lengths")
    scored = task.first_documents(config.documents, "bench.documents")
    plan, device = scored[0].plan(task.plan), pair.target.device
    mapping = FormMap.of(bridge, name, device=device)
    mapping.require_plan(plan, pair.target.geometry.layers)
    bare = [length for length in config.lengths if plan.split(length).carried == 0]
    if bare:
        raise UsageError(f"bench.lengths={bare[0]}: the plan carries nothing of so few tokens; give longer prompts.")
    (document,) = task.documents(longest, longest + 1, 1, setting="bench.lengths")
    prompts = {length: document.prompt[:, :length].to(device) for length in sorted(config.lengths)}
    bench = Bench(pair, mapping, plan, config.repeats)
    with torch.inference_mode():
        gate = bench.require_correct(prompts[min(prompts)])
        quality = _quality(task, bridge, name, plan, scored)
        copied = floor.copy_rate(device, config.repeats)
        times = {str(length): bench.time_length(prompt, copied) for length, prompt in prompts.items()}
    return {
        "schema": 1,
        "pair": pair.describe(),
        "map": name,
        "mapper": bridge.map(name).mapper,
        "plan": plan.to_dict(),
        "product_dtype": str(bench.product_dtype).removeprefix("torch."),
        "gate": gate,
        "quality": quality,
        "copy_bytes_per_s": copied,
        "weight_bytes": floor.weight_bytes(mapping.packed(bench.product_dtype), bench.layers),
        "peak_memory_bytes": peak_memory(pair),
        "lengths": times,
    }


def clear_partial(folder: Path) -> None:
    """Remove what was kept of an unfinished score."""
    (folder / "points.partial.jsonl").unlink(missing_ok=True)
