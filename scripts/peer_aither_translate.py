#!/usr/bin/env python3
"""The steps of `peer_aither.py` that run in the environment of aither-kvcache: its own fit and its own translation.

Capture, strip, fit, translation and rotation are the package's code, on token ids that `peer_aither.py texts` drew.
kvbridge is not needed here, and the package is not needed there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm.auto import tqdm

BLOCK, PROMPT, LONG = 512, 448, 2048
KINDS = ("keys", "values")
PACKAGE = "aither-kvcache"


def peer(module: str) -> Any:
    """A module of the measured package."""
    try:
        return importlib.import_module(f"aither_kvcache.kvtransfer.{module}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is missing: run this step in the environment that has {PACKAGE}.") from error


def write(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file, all of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    save(partial)
    os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    write(path, lambda partial: partial.write_text(json.dumps(content, indent=1) + "\n"))


def read_json(path: Path, step: str) -> Any:
    if not path.exists():
        raise SystemExit(f"{path} is missing: run the step `{step}` with the same --out first.")
    return json.loads(path.read_text())


def load_model(location: str) -> Any:
    """A model as kvbridge loads it, with torch's attention; the package's slower `eager` is no part of its method."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(location, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def load_geometry(location: str) -> Any:
    """The package's description of one model."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(location), AutoTokenizer.from_pretrained(location)
    return peer("geometry").KVGeometry.from_hf(Path(location).name, config, tokenizer, "bfloat16")


def read_prompt(model: Any, tokens: np.ndarray) -> Any:
    """A model's own cache of one prompt; one row of logits is computed."""
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return model(ids, use_cache=True, logits_to_keep=1).past_key_values


def strip(cache: Any, geometry: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys without rotation and values, `[T, L·H·D]` in float16, as the package captures them."""
    capture = peer("capture")
    layers = capture._extract_kv(cache)
    return capture._stack_layers(layers, geometry, np.arange(layers[0][0].shape[-2]))


def capture_blocks(location: str, geometry: Any, blocks: np.ndarray, prefix: Path) -> None:
    """Fill `PREFIX_k.npy` and `PREFIX_v.npy` block by block; a killed run goes on at the block where it was."""
    counter = prefix.with_name(prefix.name + ".done")
    done = int(counter.read_text()) if counter.exists() else 0
    if done == len(blocks):
        return
    model = load_model(location)
    shape = (blocks.size, geometry.flat_width)
    stores = [
        np.lib.format.open_memmap(f"{prefix}_{kind}.npy", "r+" if done else "w+", np.dtype(np.float16), shape)
        for kind in "kv"
    ]
    for number in tqdm(range(done, len(blocks)), initial=done, total=len(blocks), unit="block", desc=prefix.name):
        for store, rows in zip(stores, strip(read_prompt(model, blocks[number]), geometry), strict=True):
            store[number * BLOCK : (number + 1) * BLOCK] = rows
        write_json(counter, number + 1)


def capture_pair(out: Path, models: dict[str, str]) -> Path:
    """The folder that the package's fit reads, from our blocks where its own capture reads a folder of files."""
    folder = out / "capture"
    folder.mkdir(exist_ok=True)
    blocks, held_out = np.load(out / "blocks.npy"), np.load(out / "held_out.npy")
    geometries = {side: load_geometry(location) for side, location in models.items()}
    verdict = peer("geometry").check_pair(geometries["source"], geometries["target"])
    verdict.raise_if_blocked()
    for side, short in (("source", "src"), ("target", "tgt")):
        for split, chosen in (("train", ~held_out), ("val", held_out)):
            capture_blocks(models[side], geometries[side], blocks[chosen], folder / f"{split}_{short}")
    train, val = int((~held_out).sum()), int(held_out.sum())
    manifest = peer("capture").CaptureManifest(
        source=geometries["source"].to_dict(),
        target=geometries["target"].to_dict(),
        seq_len=BLOCK,
        n_train_tokens=train * BLOCK,
        n_val_tokens=val * BLOCK,
        n_train_docs=train,
        n_val_docs=val,
        corpus_sha256=hashlib.sha256(blocks.tobytes()).hexdigest(),
        regime_flags=verdict.regime_flags,
        created_at=time.time(),
    )
    manifest.write(folder)
    return folder


def fit_packs(options: argparse.Namespace) -> None:
    """Capture, then the package's own fit for every number of source layers that is asked for."""
    out = Path(options.out)
    models = read_json(out / "texts.json", "texts")["models"]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = capture_pair(out, models)
    for k in options.top_k:
        pack = out / f"pack-k{k}"
        if (pack / "fit.json").exists():
            continue
        start = time.perf_counter()
        summary = peer("fit").fit_pack(folder, pack, top_k=k)
        record = {"top_k": k, "seconds": time.perf_counter() - start, "threads": torch.get_num_threads()}
        summary["pack"].pop("dir")
        write_json(pack / "fit.json", record | {"version": version(PACKAGE)} | summary)


def open_packs(out: Path, models: dict[str, str]) -> dict[int, Any]:
    """The fitted packs by their number of source layers, loaded as the package's own evaluation loads them."""
    live = {f"live_{side}": load_geometry(location) for side, location in models.items()}
    ks = sorted(read_json(path, "fit")["top_k"] for path in out.glob("pack-k*/fit.json"))
    if not ks:
        raise SystemExit(f"{out} holds no pack: run the step `fit` with the same --out first.")
    return {k: peer("pack").load_pack(out / f"pack-k{k}", require_acceptance=False, **live) for k in ks}


def translate_document(states: tuple[np.ndarray, np.ndarray], pack: Any, file: Path) -> None:
    """Write the package's keys, rotated by it, and values `[L, H, T, D]` of one document, in the target's dtype."""
    layers = peer("transfer").translate_cache(*states, pack, np.arange(len(states[0])))
    stacked = {
        kind: torch.from_numpy(np.concatenate([layer[at] for layer in layers])).bfloat16()
        for at, kind in enumerate(KINDS)
    }
    file.parent.mkdir(exist_ok=True)
    write(file, lambda partial: save_file(stacked, partial))


def translate_documents(options: argparse.Namespace) -> None:
    """The package's caches of all documents, and the time of every part at two lengths."""
    out = Path(options.out)
    models = read_json(out / "texts.json", "texts")["models"]
    packs = open_packs(out, models)
    geometry = packs[min(packs)].source
    source = load_model(models["source"])
    documents = np.load(out / "documents.npy")[:, :PROMPT]
    for number, prompt in enumerate(tqdm(documents, unit="doc", desc="translate")):
        files = {k: out / f"pack-k{k}" / "caches" / f"{number:04d}.safetensors" for k in packs}
        missing = {k: file for k, file in files.items() if not file.exists()}
        if missing:
            states = strip(read_prompt(source, prompt), geometry)
            for k, file in missing.items():
                translate_document(states, packs[k], file)
    target = load_model(models["target"])
    prompts = (documents[0], np.load(out / "long.npy")[0])
    seconds = {str(len(prompt)): time_parts(source, target, packs, prompt, options.repeats) for prompt in prompts}
    write_json(out / "times.json", {"threads": torch.get_num_threads(), "rounds": options.repeats, "seconds": seconds})


def time_parts(source: Any, target: Any, packs: dict[int, Any], prompt: np.ndarray, repeats: int) -> dict[str, float]:
    """Median seconds of each part, after one round that does not count; the parts of one round follow each other."""
    transfer, geometry, positions = peer("transfer"), packs[min(packs)].source, np.arange(len(prompt))
    seconds: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments)
        seconds.setdefault(part, []).append(time.perf_counter() - start)
        return result

    for _ in tqdm(range(repeats + 1), unit="round", desc=f"time {len(prompt)} tokens"):
        cache = timed("source prefill", read_prompt, source, prompt)
        states = timed("strip", strip, cache, geometry)
        for k, pack in packs.items():
            layers = timed(f"translate, k={k}", transfer.translate_cache, *states, pack, positions)
            timed(f"into a cache, k={k}", transfer._to_cache, layers, torch, "cpu", torch.bfloat16)
        timed("target prefill", read_prompt, target, prompt)
    return {part: median(values[1:]) for part, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    fit, translate = steps.add_parser("fit"), steps.add_parser("translate")
    for command, work in ((fit, fit_packs), (translate, translate_documents)):
        command.add_argument("--out", required=True, help="the folder of `peer_aither.py texts`")
        command.set_defaults(work=work)
    fit.add_argument("--top-k", type=int, nargs="+", default=[8], help="source layers that one target layer reads")
    translate.add_argument("--repeats", type=int, default=5, help="timed rounds per length")
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
