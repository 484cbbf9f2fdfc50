"""What a run found, in plain words, from `results.json` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbridge.eval.gate import LIMITS
from kvbridge.eval.statistics import mean_interval, resample

INJECTED_LIMITS = {str(dtype).removeprefix("torch."): limit for dtype, limit in LIMITS.items()}


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of a verdict.

    Attributes:
        tone: `good`, `bad`, `plain` or `warning`.
        text: the sentence.
    """

    tone: str
    text: str


def percent(share: float, digits: int = 0) -> str:
    # Adding zero turns a rounded −0 into 0.
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def kl_difference(results: dict[str, Any], arm: str, other: str) -> dict[str, Any]:
    """Paired difference of KL per document, arm minus other, with its 95 % interval."""
    differences = [document[arm]["kl"] - document[other]["kl"] for document in results["documents"]]
    run = results["run"]
    draws = resample(len(differences), run["settings"]["eval"]["resamples"], run["seeds"]["eval"])
    return mean_interval(differences, draws)


def _headline(results: dict[str, Any]) -> Finding:
    gap = results["arms"]["mapped"]["gap_recovered"]
    share = percent(results["cost"]["target_prefill_flops_share"], 1)
    if gap["mean"] is None:
        return Finding(
            "warning",
            f"How much of the gap is recovered cannot be said: {gap['reason']}. The hand-off costs {share} of the "
            "large model's prefill.",
        )
    low, high = (percent(end) for end in gap["ci95"])
    if gap["ci95"][1] < 0:
        return Finding(
            "bad",
            f"The mapped cache is worse than the small model alone: it recovers {percent(gap['mean'])} of the gap "
            f"between the small and the large model (95 % interval {low} to {high}), at {share} of the large model's "
            "prefill.",
        )
    if gap["ci95"][0] <= 0:
        return Finding(
            "plain",
            f"The mapped cache cannot be told apart from the small model alone: it recovers {percent(gap['mean'])} "
            f"of the gap between the small and the large model (95 % interval {low} to {high}), at {share} of the "
            "large model's prefill.",
        )
    return Finding(
        "good",
        f"The mapped cache recovers {percent(gap['mean'])} of the gap between the small and the large model "
        f"(95 % interval {low} to {high}), at {share} of the large model's prefill.",
    )


def _against(results: dict[str, Any], arm: str, name: str) -> Finding:
    """Mapped against one alternative, by paired KL."""
    mapped, other = (results["arms"][which]["kl"]["mean"] for which in ("mapped", arm))
    difference = kl_difference(results, "mapped", arm)
    figures = f"KL {mapped:.3f} against {other:.3f}"
    if difference["ci95"][1] < 0:
        return Finding("good", f"It is closer to the large model than {name} ({figures}).")
    if difference["ci95"][0] > 0:
        return Finding("bad", f"It is further from the large model than {name} ({figures}).")
    return Finding("plain", f"It cannot be told apart from {name} on these documents ({figures}).")


def _content(results: dict[str, Any]) -> Finding:
    mapped, other = (results["arms"][which]["kl"]["mean"] for which in ("mapped", "other_document"))
    if kl_difference(results, "other_document", "mapped")["ci95"][0] > 0:
        return Finding(
            "plain",
            f"What is carried matters: the same hand-off with another document's cache has KL {other:.3f} "
            f"instead of {mapped:.3f}.",
        )
    return Finding(
        "warning",
        f"Another document's cache does as well (KL {other:.3f} against {mapped:.3f}): "
        "this map does not carry what the text said.",
    )


def _gate(results: dict[str, Any]) -> Finding | None:
    kl = results["arms"]["injected"]["kl"]["mean"]
    limit = INJECTED_LIMITS[results["run"]["dtype"]]
    if kl < limit:
        return None
    return Finding(
        "warning",
        f"The large model's own cache, taken apart and put back, already differs (KL {kl:.4f}, "
        f"expected below {limit:g}): do not trust the other figures.",
    )


def _speed(results: dict[str, Any]) -> Finding:
    cost = results["cost"]
    native = cost["native_ttft_s"]
    return Finding(
        "plain" if cost["warm_ttft_s"] < native else "bad",
        f"The first token comes after {seconds(cost['warm_ttft_s'])} once the small model has read the prompt, after "
        f"{seconds(cost['cold_ttft_s'])} with its reading counted, and after {seconds(native)} if the large model "
        f"reads the {cost['prompt_tokens']} tokens itself: {_ratio(native / cost['warm_ttft_s'])} and "
        f"{_ratio(native / cost['cold_ttft_s'])} ({results['run']['device_name']}, {results['run']['dtype']}).",
    )


def _memory(results: dict[str, Any]) -> Finding:
    """What the probes say: the answers that each arm still finds in the context."""
    probes = results["probes"]
    shares = {arm: percent(scores["choice"]["mean"]) for arm, scores in probes["arms"].items()}
    low, high = next(entry["choice"]["ci95"] for entry in probes["differences"] if entry["against"] == "source")
    than = "more than" if low > 0 else "fewer than" if high < 0 else "not clearly more or fewer than"
    return Finding(
        "good" if low > 0 else "bad" if high < 0 else "plain",
        f"It answers {shares['mapped']} of the questions about the context where the large model answers "
        f"{shares['native']}, the small one {shares['source']} and native tail only {shares['tail_only']} (four "
        f"choices, 25 % by chance): {than} the small model alone.",
    )


def _ratio(speedup: float) -> str:
    return f"{speedup:.1f} times as fast" if speedup >= 1 else f"{1 / speedup:.1f} times as slow"


def verdict(results: dict[str, Any]) -> list[Finding]:
    """The findings of a run, the most important first."""
    tail = results["cost"]["equal_cost_tail"]
    findings = [
        _headline(results),
        _against(results, "source", "the small model alone"),
        _against(results, "tail_only", f"reading the last {tail} tokens alone, which costs the same"),
        _content(results),
        *([_memory(results)] if results.get("probes") else []),
        _speed(results),
    ]
    gate = _gate(results)
    return [gate, *findings] if gate else findings
