"""Measures the embedded pair on held-out text and memory tasks, and writes its model cards."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from embedded_data import read_texts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from kvbridge.embedded.language import Task, ledger_task, passkey_task, recall_task, tally_task, variable_task

FACTS = 4
TASKS = 200
LENGTHS = (64, 128, 256, 512)
BLOCK, TAIL = 512, 64
ORIGINS = {
    "source": "Pruned from the trained target (layers, heads, neurons and residual directions), then trained on:",
    "target": "Trained from random weights:",
}


def recall_tasks(tokenizer: PreTrainedTokenizerFast, seed: str, length: int, count: int) -> list[Task]:
    """Recall tasks whose prompts have between 90 and 100 % of `length` tokens."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    while len(tasks) < count:
        task = recall_task(rng, FACTS, max(4, length - 44 - rng.randrange(8)))
        if 0.88 * length <= len(tokenizer(f"{task.context} {task.question}").input_ids) <= length:
            tasks.append(task)
    return tasks


@torch.no_grad()
def recall_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task]) -> float:
    """Share of tasks whose greedy continuation of the question is exactly the answer and a full stop."""
    right = 0
    for start in range(0, len(tasks), 16):
        group = tasks[start : start + 16]
        prompts = [tokenizer(f"{t.context} {t.question}").input_ids for t in group]
        answers = [tokenizer(f" {t.answer}.", add_special_tokens=False).input_ids for t in group]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        choice = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            begin = len(prompt) - 1
            right += choice[i, begin : begin + len(answer)].tolist() == answer
    return right / len(tasks)


@torch.no_grad()
def mean_nll(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> tuple[float, float]:
    """Nats per token over the first `BLOCK` tokens of each text, and over the last `TAIL` of those alone."""
    rows = torch.tensor([tokenizer(text).input_ids[:BLOCK] for text in texts])
    losses = []
    for ids in rows.split(8):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses.append(flat.view(len(ids), -1))
    all_losses = torch.cat(losses)
    return all_losses.mean().item(), all_losses[:, -TAIL:].mean().item()


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """A sampled continuation of a prompt (fixed seed, temperature 0.7), prompt included."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=True, temperature=0.7, top_k=0
    )
    return tokenizer.decode(out[0], skip_special_tokens=True)


def _task_scores(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, float]:
    """Exact greedy accuracy by task; recall at several lengths."""
    scores = {
        f"recall, {FACTS} facts, {length} tokens": recall_accuracy(
            model, tokenizer, recall_tasks(tokenizer, f"measure:{seed}", length, TASKS)
        )
        for length in LENGTHS
    }
    rng = random.Random(f"measure-small:{seed}")
    makers: dict[str, Callable[[], Task]] = {
        "recall, 8 facts, about 250 tokens": lambda: recall_task(rng, 8, 180),
        "pass key, about 250 tokens": lambda: passkey_task(rng, 230),
        "ledger of 6 entries": lambda: ledger_task(rng),
        "variables, 1 hop": lambda: variable_task(rng, 5, 1),
        "tally of 8 things": lambda: tally_task(rng, 8),
    }
    for name, make in makers.items():
        scores[name] = recall_accuracy(model, tokenizer, [make() for _ in range(TASKS)])
    return scores


def measure_model(folder: Path, texts: Sequence[str], seed: int) -> dict[str, Any]:
    """Size, losses, task accuracies and a sample of a shipped checkpoint, computed in fp32 from its bf16 weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nll, tail = mean_nll(model, tokenizer, texts)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "megabytes": (folder / "model.safetensors").stat().st_size / 1e6,
        "nll": nll,
        "nll_tail": tail,
        "tasks": _task_scores(model, tokenizer, seed),
        "sample": sample(model, tokenizer, "Marla was a smith from Bresvale. Marla"),
    }


def measure_pair(out: Path, training: dict[str, dict[str, float]], seed: int) -> dict[str, dict[str, Any]]:
    """Measures both checkpoints under `out`, writes their cards and returns the figures.

    Args:
        out: folder that holds `source`, `target` and `text`.
        training: per model the steps, tokens and CPU seconds its training took.
        seed: names the task streams; training never draws from them.
    """
    texts = read_texts(out / "text" / "evaluation.jsonl.gz")
    results = {name: measure_model(out / name, texts, seed) for name in ("source", "target")}
    for name in results:
        (out / name / "README.md").write_text(card(name, results, training[name], seed, len(texts)))
    return results


def card(name: str, results: dict[str, dict[str, Any]], training: dict[str, float], seed: int, documents: int) -> str:
    """The model card of one checkpoint."""
    own, source, target = results[name], results["source"], results["target"]
    other = "target" if name == "source" else "source"
    rows = "\n".join(f"| {task} | {source['tasks'][task]:.3f} | {target['tasks'][task]:.3f} |" for task in own["tasks"])
    losses = "\n".join(
        f"| {label} | {source[key]:.3f} | {target[key]:.3f} | {source[key] - target[key]:.3f} |"
        for label, key in ((f"first {BLOCK} tokens", "nll"), (f"last {TAIL} of these", "nll_tail"))
    )
    return f"""---
license: apache-2.0
library_name: transformers
language: en
---
# kvbridge embedded pair: {name}

A Llama-architecture model of {own["parameters"] / 1e6:.2f} M parameters ({own["megabytes"]:.1f} MB in bf16), trained
on generated text of a small invented world (`kvbridge.embedded.language`). It exists so that kvbridge can be tested and
demonstrated offline; its partner is the {other} beside it, with the same tokenizer. It knows nothing of the real world
and is of no other use.

## Training

{ORIGINS[name]} {training["steps"]:.0f} steps, {training["tokens"] / 1e6:.1f} M tokens,
{training["cpu_seconds"] / 60:.0f} minutes of one core; Muon for the layers' matrices, AdamW for embeddings and norms,
products in bf16; rows of 64, 128, 256 and 640 tokens in turn. In the first steps one attention head is also taught
where the answer to a question stands. Every text is generated from seed {seed} and the step number; no text of other
origin was used.

    python scripts/train_embedded.py

## Held-out figures

Measured by `python scripts/train_embedded.py --only measure` in fp32 from the shipped weights, on {documents}
documents and {TASKS} tasks a row whose random streams training never draws from. A document is read with BOS.

| nats per token | source | target | gap |
|---|---|---|---|
{losses}

| exact greedy answer | source | target |
|---|---|---|
{rows}

Sample (temperature 0.7): {own["sample"]}
"""
