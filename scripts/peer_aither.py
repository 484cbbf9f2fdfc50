#!/usr/bin/env python3
"""Measure the package aither-kvcache (its `kvtransfer`) on a pair, with the texts, plans and metrics of our own tables.

Its own code captures, fits, strips, translates and rotates; ours draws the texts and scores the caches that come out.
The package lives in an environment of its own, so the work goes in four steps through one folder, each of which goes
on where it was killed:

    python3.11 -m venv PEER
    PEER/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors tqdm aither-kvcache==2.4.1
    python scripts/peer_aither.py texts --source DIR --target DIR --calibration FILE --corpus FILE --out DIR
    PEER/bin/python scripts/peer_aither_translate.py fit --out DIR
    PEER/bin/python scripts/peer_aither_translate.py translate --out DIR
    python scripts/peer_aither.py score --out DIR

`texts` draws the blocks that `kvbridge calibrate` reads and the documents that `scripts/reference_table.py` scores.
`fit` is the package's own: float64 Gram matrices, source layers ranked and λ swept by held-out R², a pack in float16.
`translate` writes its caches of the documents and times it beside both models' prefill, all in one process.
`score` gives the caches to the target under two plans and prints the tables of `table.md`; `table.json` has it all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_aither_translate import BLOCK, KINDS, LONG, PACKAGE, PROMPT, read_json, write_json
from reference_table import PUBLISHED, TAIL_16, table
from safetensors.torch import load_file

from kvbridge import HandoffPlan, ModelPair, load_pair
from kvbridge.calibration import CorpusConfig
from kvbridge.calibration.draw import Draw
from kvbridge.cli.scripts import run_script
from kvbridge.eval import EvalConfig, evaluate
from kvbridge.eval.arms import Arm, Context, Reading, mapped_arm
from kvbridge.eval.documents import Document, take_documents
from kvbridge.eval.results import summarise_arms
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.model import KVModel
from kvbridge.states import ContentStates


def draw_texts(options: argparse.Namespace) -> None:
    """Token ids of the calibration blocks, of the scored documents and of one long prompt."""
    out = Path(options.out)
    models = {side: str(Path(getattr(options, side)).expanduser().resolve()) for side in ("source", "target")}
    pair = load_pair(models["source"], models["target"])
    calibration = CorpusConfig(options.calibration).open("calibration")
    corpus = CorpusConfig(options.corpus).open("eval")
    settings = {
        "pair": pair.identity(),
        "calibration": calibration.fingerprint,
        "corpus": corpus.fingerprint,
        "tokens": options.tokens,
        "documents": options.documents,
    }
    path = out / "texts.json"
    if path.exists():
        if read_json(path, "texts")["settings"] != settings:
            raise SystemExit(f"{out} holds the texts of other settings: give another --out.")
        return
    blocks = Draw(options.tokens, BLOCK, held_out=0.1, seed=0).blocks(calibration, pair.tokenizer)
    documents = take_documents(corpus, pair.tokenizer, documents=options.documents, tokens=BLOCK, prompt=PROMPT)
    long = take_documents(corpus, pair.tokenizer, documents=1, tokens=LONG + 1, prompt=LONG, join=True)
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "blocks.npy", np.asarray(blocks.tokens))
    np.save(out / "held_out.npy", blocks.split == 1)
    np.save(out / "documents.npy", torch.cat([torch.cat((d.prompt, d.gold), dim=1) for d in documents]).numpy())
    np.save(out / "long.npy", long[0].prompt.numpy())
    names = [document.name for document in documents]
    write_json(path, {"settings": settings, "models": models, "names": names})


@dataclass(frozen=True, slots=True)
class StoredCache:
    """A map whose result lies in a file: the package's keys, rotated by it, and its values of one document.

    Our codec strips these keys in fp32 and the hand-off rotates them again, which gives the same bf16 numbers back (of
    688,128 one differed in its last bit) and, to the last bit, the logits of the package's own way to inject them.
    """

    target: KVModel
    file: Path

    def apply(self, source: ContentStates, layers: range, native: ContentStates | None = None) -> ContentStates:
        stored, at = load_file(self.file), source.positions
        keys, values = (stored[kind][layers.start : layers.stop, None][..., at, :].float() for kind in KINDS)
        return ContentStates(self.target.rotary.strip(keys, at), values, at)


@dataclass(frozen=True, slots=True)
class PackCost:
    """Operations of a pack: all heads of one target layer read all heads of k source layers, keys and values apart."""

    weights_per_layer: int

    def flops_per_token(self, layers: range) -> int:
        return 2 * len(KINDS) * len(layers) * self.weights_per_layer


def stored_arm(pair: ModelPair, caches: Path, documents: list[Document], plan: HandoffPlan, *, shift: int = 0) -> Arm:
    """The hand-off of the cache that the package made of the document, or of the one `shift` places after it."""

    def arm(context: Context) -> Reading:
        number = [document is context.document for document in documents].index(True) + shift
        file = caches / f"{number % len(documents):04d}.safetensors"
        return mapped_arm(pair, StoredCache(pair.target, file), plan)(context)

    return arm


def name_rows(k: int) -> tuple[str, str, str]:
    return (
        f"{PACKAGE}, k={k}, every position mapped",
        f"… four sinks, layer 0 and a tail of 16 exact (k={k})",
        f"… every position mapped, from another document (k={k})",
    )


def build_arms(pair: ModelPair, out: Path, ks: list[int], documents: list[Document]) -> dict[str, Arm]:
    """One arm per row of the table."""
    arms: dict[str, Arm] = {"source": lambda context: context.source}
    for k in ks:
        caches = out / f"pack-k{k}" / "caches"
        own, plan, other = name_rows(k)
        arms[own] = stored_arm(pair, caches, documents, PUBLISHED)
        arms[plan] = stored_arm(pair, caches, documents, TAIL_16)
        arms[other] = stored_arm(pair, caches, documents, PUBLISHED, shift=-1)
    return arms


def cost_shares(pair: ModelPair, ks: list[int]) -> dict[str, float]:
    """Share of the target's prefill FLOPs, per row."""
    cost = ModelCost.of(pair.target)
    widths = [model.geometry.kv_heads * model.geometry.head_dim for model in (pair.source, pair.target)]
    return {
        row: prefill_share(cost, plan, PROMPT, PackCost(k * widths[0] * widths[1]))
        for k in ks
        for row, plan in zip(name_rows(k), (PUBLISHED, TAIL_16), strict=False)
    }


def describe_pack(out: Path, fit: dict[str, Any], summary: dict[str, Any]) -> str:
    """One line: what the fit took and reached, and whether the package would load the pack with these figures."""
    k = fit["top_k"]
    manifest, mapped = read_json(out / f"pack-k{k}" / "mapper.manifest.json", "fit"), summary[name_rows(k)[0]]
    top1, delta = mapped["top1"]["mean"], mapped["nll"]["mean"] - summary["native"]["nll"]["mean"]
    floor, ceiling = manifest["min_top1_agreement"], manifest["max_nll_delta"]
    verdict = "load" if top1 >= floor and delta <= ceiling else "refuse"
    tokens = f"{manifest['train_tokens']:,} tokens and {manifest['val_tokens']:,} held out"
    return (
        f"* k={k}: fitted in {fit['seconds']:.0f} s (threads: {fit['threads']}) on {tokens}, "
        f"{fit['pack']['weight_mib']} MiB, held-out R² of keys {manifest['val_r2_k']:.3f} and of values "
        f"{manifest['val_r2_v']:.3f}. With top-1 {top1:.3f} and NLL + {delta:.3f} its own gate "
        f"(≥ {floor}, ≤ + {ceiling}) would {verdict} it.\n"
    )


def time_table(times: dict[str, Any], ks: list[int]) -> str:
    """Median seconds per part and prompt length, and how many times the target's own prefill takes as long."""
    columns = times["seconds"].values()
    heads = " | ".join(f"{int(length):,} tokens" for length in times["seconds"])
    lines = [f"| seconds (threads: {times['threads']}) | {heads} |", "|---" * (len(columns) + 1) + "|"]
    for part in times["seconds"][str(PROMPT)]:
        lines.append(f"| {part} | {' | '.join(f'{seconds[part]:.3f}' for seconds in columns)} |")
    for k in ks:
        parts = ("strip", f"translate, k={k}", f"into a cache, k={k}")
        ratios = [seconds["target prefill"] / sum(seconds[part] for part in parts) for seconds in columns]
        lines.append(f"| target prefill ÷ the three, k={k} | {' | '.join(f'{ratio:.1f}' for ratio in ratios)} |")
    return "\n".join(lines) + "\n"


def score_caches(options: argparse.Namespace) -> None:
    """Score the package's caches beside the source alone, and print the tables."""
    out = Path(options.out)
    texts, times = read_json(out / "texts.json", "texts"), read_json(out / "times.json", "translate")
    fits = sorted((read_json(path, "fit") for path in out.glob("pack-k*/fit.json")), key=lambda fit: fit["top_k"])
    ks = [fit["top_k"] for fit in fits]
    pair = load_pair(texts["models"]["source"], texts["models"]["target"])
    pair.require(texts["settings"]["pair"], str(out))
    tokens = torch.from_numpy(np.load(out / "documents.npy"))[:, None]
    documents = [Document(n, t[:, :PROMPT], t[:, PROMPT:]) for n, t in zip(texts["names"], tokens, strict=True)]
    lengths = {"tokens": BLOCK, "prompt": PROMPT, "rollout": options.rollout}
    config = EvalConfig(documents=len(documents), **lengths, samples=0)
    arms = build_arms(pair, out, ks, documents)
    rollout = {} if options.rollout == EvalConfig.rollout else {"rollout": options.rollout}
    identity = texts["settings"] | {"fits": fits} | rollout
    records = evaluate(pair, arms, documents, config, partial=out / "documents.jsonl", identity=identity)
    summary, shares = summarise_arms(records, config), cost_shares(pair, ks)
    packs = "".join(describe_pack(out, fit, summary) for fit in fits)
    (out / "table.md").write_text(f"{table(summary, shares)}\n{packs}\n{time_table(times, ks)}")
    write_json(out / "table.json", {"arms": summary, "shares": shares, "fits": fits, "times": times})
    print((out / "table.md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    texts, score = steps.add_parser("texts"), steps.add_parser("score")
    for name in ("source", "target", "calibration", "corpus"):
        texts.add_argument(f"--{name}", required=True)
    texts.add_argument("--tokens", type=int, default=122_880, help="of the fit; a tenth more is held out")
    texts.add_argument("--documents", type=int, default=40, help="that are scored")
    for command, work in ((texts, draw_texts), (score, score_caches)):
        command.add_argument("--out", required=True)
        command.set_defaults(work=work)
    score.add_argument(
        "--rollout", type=int, default=32, help="greedy tokens of the target that caches are forced through"
    )
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    run_script(main)
