#!/usr/bin/env python3
"""Train a residual branch on a map that lies in a bridge, and leave a bridge whose map has it.

For pairs whose training takes hours: every stage resumes after a kill, and `OUT/*/curve.json` shows how it goes. One
step reads `accumulate` documents once, with `suffixes` hand-offs in each; prompts are never read again after the first
look at a document, since states, caches and the native output lie in `OUT/readings` until the end. Processes that
`accelerate launch` or `torchrun` starts share the documents to read, the batches of a step and the looks; the first one
writes the bridge. A map that has a branch of this kind already keeps it, and both are one branch in the end. Where no
look is better than the first, no bridge is written. The moments must be those that the map was fitted on.

    python scripts/real_residual.py --source DIR --target DIR --bridge runs/joint/bridge \\
        --moments runs/joint/calibration --corpus FILE --out runs/joint_gelu kind=gelu rank=256 steps=600
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from pathlib import Path

from kvbridge import Bridge, HandoffPlan, load_pair
from kvbridge.calibration import CorpusConfig, load_of_bridge
from kvbridge.cli.scripts import residual_settings, run_script
from kvbridge.mappers.residual import finish, prepare_training, training_text
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.processes import process_state


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "bridge", "moments", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--map", help="name of the map, where the bridge has several")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--storage", default="bfloat16")
    parser.add_argument("--sinks", type=int, default=4)
    named = ", ".join(field.name for field in fields(ResidualConfig))
    parser.add_argument("settings", nargs="*", help=f"name=value of mapper.residual: {named}")
    return parser.parse_args()


def main() -> None:
    options = parse()
    settings: ResidualConfig = residual_settings(options.settings)
    settings.require_wanted()
    bridge = Bridge.from_pretrained(options.bridge)
    name = bridge.map_name(options.map)
    fitted, out = bridge.map(name), Path(options.out)
    moments = load_of_bridge(Path(options.moments), bridge, options.bridge)
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    bridge.require_pair(pair)
    text = training_text(moments, CorpusConfig(options.corpus), settings, pair.tokenizer)
    trainer = prepare_training(pair, fitted.forms, moments, text, settings, out, HandoffPlan(sinks=options.sinks))
    forms = finish(trainer)
    if not process_state().is_main_process:
        return
    progress = trainer.checkpoint.progress
    steps = max(1, sum(stage.steps for stage in trainer.stages))
    first, best = progress.curve[0]["dev_kl"], progress.best_kl
    print(f"dev KL {first:.4f} → {best:.4f}; {progress.seconds / steps:.1f} s a step")
    if forms is None:
        print("training found nothing that beats the map as it was; no bridge is written")
        return
    former = [fitted.mapper["residual"]] if "residual" in fitted.mapper else []
    earlier = [*fitted.mapper.get("earlier_residuals", []), *former]
    mapper = fitted.mapper | {"residual": asdict(settings)} | ({"earlier_residuals": earlier} if earlier else {})
    adapted = replace(fitted, forms=forms, mapper=mapper)
    bridge.with_map(name, adapted).save_pretrained(out / "bridge", dtype=options.storage)


if __name__ == "__main__":
    run_script(main)
