#!/usr/bin/env python3
"""One long prompt, answered by either model alone and by the large one on the carried cache: timings and texts.

The example of README.md comes from it:

    python scripts/long_prompt.py --source DIR --target DIR --bridge runs/joint/bridge --corpus FILE --out runs/long
"""

from __future__ import annotations

import argparse
import json
from itertools import takewhile
from pathlib import Path

from kvbridge import Bridge, HandoffPlan, load_pair
from kvbridge.calibration import CorpusConfig
from kvbridge.cascade import Cascade, Never, Result
from kvbridge.cli.scripts import run_script
from kvbridge.eval.documents import take_documents


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "bridge", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt")
    parser.add_argument("--new", type=int, default=40, help="length of the answers")
    parser.add_argument("--document", type=int, default=0, help="which one of the corpus")
    parser.add_argument("--tail", type=int, default=16)
    parser.add_argument("--attended", type=float, default=0.0, help="plan.native_attended")
    return parser.parse_args()


def waits(result: Result) -> dict[str, float]:
    """Seconds until the source had read, until the target could go on, and until the first token was there."""
    return {name: result.seconds[name] for name in ("source", "handed_over", "first_token") if name in result.seconds}


def row(name: str, seconds: float, native: float, text: str) -> str:
    shown = " ".join(text.split()).replace("|", "\\|")
    return f"| {name} | {seconds:.2f} s | {native / seconds:.1f} × | `{shown}` |"


def main() -> None:
    options = parse()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    bridge = Bridge.from_pretrained(options.bridge, pair=pair)
    corpus = CorpusConfig(options.corpus).open("eval")
    document = take_documents(
        corpus,
        pair.tokenizer,
        documents=options.document + 1,
        tokens=options.tokens + options.new,
        prompt=options.tokens,
    )[-1]
    plan = HandoffPlan(native_head=0, native_tail=options.tail, native_attended=options.attended)
    prompt = document.prompt[0].tolist()
    found = {
        "small model alone": Cascade(pair, None, policy=Never()).generate(prompt, max_new_tokens=options.new),
        "large model alone": Cascade(pair, None).generate(prompt, max_new_tokens=options.new),
        "large model, cache carried": Cascade(pair, bridge, plan=plan).generate(prompt, max_new_tokens=options.new),
    }
    seconds = {name: waits(result) for name, result in found.items()}
    alone, carried = seconds["large model alone"], seconds["large model, cache carried"]
    # The target alone waits for no source.
    native = alone["first_token"] - alone["source"]
    texts = {name: result.text for name, result in found.items()}
    waited = [
        ("small model alone", seconds["small model alone"]["first_token"], texts["small model alone"]),
        ("large model alone", native, texts["large model alone"]),
        ("carried, both models' work", carried["first_token"], texts["large model, cache carried"]),
        ("carried, when the small one has read", carried["first_token"] - carried["source"], "the same"),
    ]
    lines = ["| | time to first token | | answer |", "|---|---|---|---|"]
    lines += [row(name, took, native, text) for name, took, text in waited]
    pairs = zip(found["large model alone"].tokens, found["large model, cache carried"].tokens, strict=False)
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))
    outcome = found["large model, cache carried"].outcome
    lines += ["", f"The first {same} of {options.new} tokens are those of the large model alone; outcome {outcome}."]
    (out / "example.md").write_text("\n".join(lines) + "\n")
    record = {name: result.to_dict() for name, result in found.items()}
    record["prompt_end"] = pair.tokenizer.decode(prompt[-64:])
    (out / "example.json").write_text(json.dumps(record, indent=1, ensure_ascii=False, default=str))
    print((out / "example.md").read_text())


if __name__ == "__main__":
    run_script(main)
