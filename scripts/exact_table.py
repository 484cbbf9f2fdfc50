#!/usr/bin/env python3
"""Show that exact mode writes the target's own text, and what it costs to see it early.

Every figure of docs/exact.md comes from it. A killed run goes on where it was; `--parts` runs some parts alone:

    python scripts/exact_table.py --bridge runs/joint/bridge --source embedded --corpus embedded --out runs/exact

Times are CPU time of one thread, so that other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import chisquare
from torch import Tensor
from tqdm import tqdm

from kvbridge import Bridge, Handoff, HandoffPlan, ModelPair, hand_off, load_pair
from kvbridge.calibration import CorpusConfig
from kvbridge.cascade.events import Event
from kvbridge.cascade.exact import DraftSchedule, exact_events
from kvbridge.cascade.reader import Reader, decode_events
from kvbridge.cascade.sampling import SamplingParams, process_logits
from kvbridge.cascade.speculative import SourceDrafter, speculative_events
from kvbridge.cascade.writing import Writing
from kvbridge.cli.scripts import run_script
from kvbridge.eval.documents import take_documents
from kvbridge.eval.exactness import first_difference, own_tokens
from kvbridge.kernels import FormMap

PLAN = HandoffPlan()
PARTS = {"float32": "float32", "bfloat16": "bfloat16", "sampled": "float32"}


def drain(events: Generator[Event, None, Any]) -> tuple[list[Event], Any, dict[str, float]]:
    """All events, what the generator returns, and CPU seconds to the first event of each kind and to the end."""
    start, at, seen = time.process_time(), dict[str, float](), list[Event]()
    while True:
        try:
            seen.append(next(events))
        except StopIteration as end:
            return seen, end.value, at | {"end": time.process_time() - start}
        at.setdefault(seen[-1].kind, time.process_time() - start)


def tokens_of(events: list[Event], kind: str) -> list[int]:
    """Tokens of all events of one kind."""
    return [token for event in events if event.kind == kind for token in event.tokens]


def native_times(pair: ModelPair, prompt: Tensor, params: SamplingParams) -> dict[str, float]:
    """CPU seconds of the target alone, to its first token and to the end."""
    start = time.process_time()
    reader, writing = Reader.fresh(pair.target), Writing(pair.target, prompt, params, pair.tokenizer)
    list(writing.commit([writing.choose(reader.read(writing.prompt)[0])]))
    first = time.process_time() - start
    list(decode_events(reader, writing))
    return {"first": first, "end": time.process_time() - start}


def timed_handoff(pair: ModelPair, mapping: FormMap, prompt: Tensor) -> tuple[Handoff, float]:
    """A hand-off and its CPU seconds; the source has read the prompt before."""
    states = pair.source.content(pair.source.read(prompt))
    start = time.process_time()
    handoff = hand_off(pair.target, PLAN, mapping, states, prompt)
    return handoff, time.process_time() - start


def compare(pair: ModelPair, mapping: FormMap, prompt: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """One prompt: is the text the target's own, how much of the draft stayed, when was what there."""
    params, schedule = SamplingParams(options.new), DraftSchedule(options.chunk, options.steps)
    handoff, handed = timed_handoff(pair, mapping, prompt)
    events, ending, seconds = drain(
        exact_events(pair.target, handoff, prompt, params, tokenizer=pair.tokenizer, schedule=schedule)
    )
    written, own = tokens_of(events, "commit"), own_tokens(pair.target, prompt, params, pair.tokenizer)
    difference = first_difference(pair.target, prompt, written, own)
    return {
        "difference": difference and asdict(difference) | {"near_tie": difference.near_tie},
        "tokens": len(written),
        "exact": asdict(ending.mapped),
        "seconds": {"handoff": handed} | {name: handed + each for name, each in seconds.items()},
    }


def compare_sides(pair: ModelPair, mapping: FormMap, prompt: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured on fewer prompts: the target alone, and the source drafting for it over the mapped cache."""
    params = SamplingParams(options.new)
    handoff, _ = timed_handoff(pair, mapping, prompt)
    drafter = SourceDrafter(pair.source, pair.source.read(prompt), options.length)
    tally = drain(speculative_events(pair.target, handoff, prompt, params, drafter, tokenizer=pair.tokenizer))[1]
    return {"speculative": asdict(tally), "native": native_times(pair, prompt, params)}


def p_value(tokens: list[int], distribution: Tensor) -> float:
    """Chi-square test of drawn tokens; tokens of fewer than five expected draws are one cell."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(distribution)).double()
    expected = distribution.double() / distribution.double().sum() * len(tokens)
    rare = expected < 5
    cells = [torch.cat((table[~rare], table[rare].sum()[None])) for table in (counts, expected)]
    return float(chisquare(cells[0], cells[1] * cells[0].sum() / cells[1].sum()).pvalue)


def hardest(pair: ModelPair, mapping: FormMap, prompts: list[Tensor], params: SamplingParams) -> tuple[Tensor, float]:
    """The prompt whose first drafted token is least like the target's own, and the overlap of the two distributions."""

    def overlap(prompt: Tensor) -> float:
        handoff, _ = timed_handoff(pair, mapping, prompt)
        logits = handoff.logits[0], pair.target.prefill(prompt)[1][0, -1]
        return float(torch.minimum(*(process_logits(each, params, prompt[0]) for each in logits)).sum())

    overlaps = [overlap(prompt) for prompt in prompts]
    worst = min(range(len(prompts)), key=overlaps.__getitem__)
    return prompts[worst], overlaps[worst]


def sample(pair: ModelPair, mapping: FormMap, prompts: list[Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """First tokens drawn in exact mode, as they were drafted and as they were committed, against the target's own."""
    params = SamplingParams(1, temperature=1.0, repetition_penalty=1.1)
    prompt, overlap = hardest(pair, mapping, prompts, params)
    handoff, _ = timed_handoff(pair, mapping, prompt)
    given = {"tokenizer": pair.tokenizer, "schedule": DraftSchedule(len(prompt[0])), "generator": params.generator()}
    drafted, written = list[int](), list[int]()
    for _ in tqdm(range(options.samples), desc="draws"):
        events, *_ = drain(exact_events(pair.target, handoff, prompt, params, **given))
        drafted += tokens_of(events, "draft")
        written += tokens_of(events, "commit")
    own = process_logits(pair.target.prefill(prompt)[1][0, -1], params, prompt[0])
    fits = {"committed": p_value(written, own), "drafted": p_value(drafted, own)}
    return {"draws": len(written), "overlap": overlap, "p_values": fits}


def rate(tallies: list[dict[str, int]]) -> float:
    """Share of drafted tokens that were accepted."""
    return sum(each["accepted"] for each in tallies) / sum(each["drafted"] for each in tallies)


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and rates over all prompts of one dtype, and ratios of medians over those with times of both."""
    found = [record["difference"] for record in records if record["difference"]]
    sides = [record for record in records if "native" in record]
    native = {name: median(record["native"][name] for record in sides) for name in ("first", "end")}
    spent = {name: median(record["seconds"][name] for record in sides) for name in ("draft", "commit", "end")}
    return {
        "prompts": len(records),
        "tokens": sum(record["tokens"] for record in records),
        "identical": len(records) - len(found),
        "near_ties": sum(each["near_tie"] for each in found),
        "largest_gap": max((each["gap"] for each in found), default=0.0),
        "draft": {
            name: sum(each["exact"][name] for each in records) / len(records) for name in ("drafted", "accepted")
        },
        "speculative": {
            "prompts": len(sides),
            "acceptance": rate([record["speculative"] for record in sides]),
            "tokens_per_pass": sum(record["tokens"] for record in sides)
            / sum(record["speculative"]["passes"] for record in sides),
        },
        "times_native_first": {
            "provisional": spent["draft"] / native["first"],
            "committed": spent["commit"] / native["first"],
        },
        "times_native_end": spent["end"] / native["end"],
    }


def run(options: argparse.Namespace) -> None:
    """The parts that were asked for, each kept in a file of its own."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        pair = load_pair(options.source, options.target, dtype=PARTS[part])
        mapping = FormMap.of(Bridge.from_pretrained(options.bridge, pair=pair))
        sizes = {"documents": options.prompts, "tokens": options.prompt + 1, "prompt": options.prompt}
        documents = take_documents(CorpusConfig(options.corpus).open("eval"), pair.tokenizer, **sizes)
        if part == "sampled":
            prompts = [each.prompt for each in documents[:20]]
            (out / "sampled.json").write_text(json.dumps(sample(pair, mapping, prompts, options)))
            continue
        place = out / f"{part}.jsonl"
        done = len(place.read_text().splitlines()) if place.exists() else 0
        for at, document in enumerate(tqdm(documents[done:], desc=part), start=done):
            record = compare(pair, mapping, document.prompt, options)
            if at < options.sides:
                record |= compare_sides(pair, mapping, document.prompt, options)
            with place.open("a") as file:
                file.write(json.dumps(record) + "\n")


def report(out: Path) -> dict[str, Any]:
    """The figures of all parts that have run."""
    figures: dict[str, Any] = {}
    for part in PARTS:
        if (place := out / f"{part}.jsonl").exists():
            figures[part] = summarise([json.loads(line) for line in place.read_text().splitlines()])
    if (place := out / "sampled.json").exists():
        figures["sampled"] = json.loads(place.read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bridge", "source", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", help="the large model, where the source is not `embedded`")
    for name, default, meaning in (
        ("prompts", 200, "documents"),
        ("prompt", 256, "tokens of each"),
        ("new", 16, "tokens written after each"),
        ("chunk", 64, "prompt tokens read natively at a time"),
        ("steps", 2, "tokens drafted before each chunk"),
        ("length", 4, "tokens that the source drafts per round"),
        ("sides", 20, "first prompts on which the target alone and the drafting source are measured too"),
        ("samples", 400, "draws of the test of sampled text"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning}; {default} by default")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run(options)
    print(json.dumps(report(Path(options.out)), indent=2))


if __name__ == "__main__":
    run_script(main)
