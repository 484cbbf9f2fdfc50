"""Trains the embedded pair on generated text and writes checkpoints, held-out text and model cards.

The target starts from noise; the source is pruned from it, as small models of a family are, and trained on.

    python scripts/train_embedded.py                    # everything; run again after a kill and it resumes
    python scripts/train_embedded.py --only source      # one model
    python scripts/train_embedded.py --only measure     # held-out losses, recall and the cards again

Batches depend on seed and step only, so an interrupted run sees the same data as an uninterrupted one.
"""

import argparse
import copy
import json
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from embedded_data import Batch, Mixture, batch, held_out_documents, train_tokenizer, write_jsonl
from embedded_measure import measure_pair, recall_accuracy, recall_tasks
from embedded_prune import prune
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvbridge.embedded

CALIBRATION_DOCUMENTS = 800
EVALUATION_DOCUMENTS = 240
TRAINING = "training.json"
# The text that decides what is pruned comes from a step that no training reaches.
PRUNING_STEP = 1_000_000


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training that ends before step `end`: row length in tokens, kinds of documents."""

    end: float
    length: int
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class Recipe:
    """Architecture and optimisation of one model.

    Attributes:
        batch_tokens: B * T in every phase.
        guided_steps: first steps whose loss also says where in the statement an answer stands.
        kept_layers: layers of the trained target that this model is pruned from; none for one that starts from noise.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    steps: int
    decay_steps: int
    batch_tokens: int
    phases: tuple[Phase, ...]
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    answer_weight: float = 4.0
    guided_steps: int = 600
    kept_layers: tuple[int, ...] = ()

    def phase(self, step: int) -> Phase:
        """The phase a step belongs to."""
        return next(phase for phase in self.phases if step < phase.end)

    def lr_scale(self, step: int) -> float:
        """Warm-up over 60 steps, constant, then linear to 3 % over the last `decay_steps`."""
        return min(1.0, (step + 1) / 60, max(0.03, (self.steps - step) / self.decay_steps))


RECIPES = {
    "target": Recipe(
        layers=6,
        hidden=192,
        heads=4,
        kv_heads=4,
        head_dim=64,
        intermediate=512,
        steps=2200,
        decay_steps=800,
        batch_tokens=2048,
        phases=(
            Phase(450, 64, Mixture(0.4, 0.5)),
            Phase(700, 128, Mixture(0.5, 0.25)),
            Phase(1100, 256, Mixture(0.45, 0.1)),
            Phase(math.inf, 640, Mixture(0.3, 0.02)),
        ),
    ),
    "source": Recipe(
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate=256,
        steps=700,
        decay_steps=350,
        batch_tokens=2048,
        phases=(
            Phase(105, 64, Mixture(0.4, 0.3)),
            Phase(210, 128, Mixture(0.5, 0.25)),
            Phase(350, 256, Mixture(0.45, 0.1)),
            Phase(math.inf, 640, Mixture(0.3, 0.02)),
        ),
        muon_lr=0.006,
        adam_lr=1.8e-3,
        guided_steps=150,
        kept_layers=(0, 1, 3, 5),
    ),
}


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama model at its random initialisation, fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # A direction that all tokens share, which is what a head needs to attend by position alone.
        model.model.embed_tokens.weight.add_(2 * config.initializer_range * torch.randn(recipe.hidden))
    return model


def build_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss(model: LlamaForCausalLM, data: Batch, guided: bool) -> torch.Tensor:
    """Weighted mean cross-entropy, nats per token, matrix products in bf16.

    A guided step adds the negative log attention that the first head of the middle layer pays, where an answer is
    due, to the answer's place in the statement: binding forms within a few hundred steps, and otherwise by luck.
    """
    model.set_attn_implementation("eager" if guided else "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=data.inputs, use_cache=False, output_attentions=guided)
    logits = output.logits.float().flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, data.labels.flatten(), reduction="none")
    value = (losses * data.weights.flatten()).sum() / data.weights.sum()
    if guided and len(data.looks):
        row, query, key = data.looks.T
        paid = output.attentions[len(output.attentions) // 2][row, 0, query, key].float()
        value = value - paid.clamp_min(1e-6).log().mean()
    return value


class Run:
    """One model's training: state on disk every `SAVE_SECONDS`, a line of progress every `LOG_STEPS` steps."""

    SAVE_SECONDS = 90
    LOG_STEPS = 50

    def __init__(self, name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, work: Path) -> None:
        self.name, self.recipe, self.tokenizer, self.seed = name, recipe, tokenizer, seed
        self.path = work / f"{name}.pt"
        self.model = build_model(recipe, tokenizer, seed)
        if recipe.kept_layers and not self.path.exists():
            self._prune(work)
        self.optimizers = build_optimizers(self.model, recipe)
        self.base_lrs = [recipe.muon_lr, recipe.adam_lr]
        self.step, self.tokens, self.cpu_seconds = 0, 0, 0.0
        self.identity = f"seed {seed}, {recipe}"
        self.probes = {length: recall_tasks(tokenizer, f"progress:{seed}", length, 48) for length in (64, 256)}
        if self.path.exists():
            self._load()

    def _prune(self, work: Path) -> None:
        """Start from the trained target."""
        large, path = build_model(RECIPES["target"], self.tokenizer, self.seed), work / "target.pt"
        state = torch.load(path, weights_only=True) if path.exists() else {"training": {"steps": 0}}
        if state["training"]["steps"] < RECIPES["target"].steps:
            raise SystemExit(f"{self.name} is pruned from the target, which is not trained yet; train it first.")
        large.load_state_dict(state["model"])
        text = batch(self.tokenizer, self.seed, PRUNING_STEP, 16, 512, Mixture(0.3, 0.0), 1.0).inputs
        prune(large.eval(), self.model, text, list(self.recipe.kept_layers))

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        if state.get("identity") != self.identity:
            raise SystemExit(f"{self.path} belongs to another seed or recipe; delete it, or give another --work.")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.cpu_seconds = (
            state["training"][key] for key in ("steps", "tokens", "cpu_seconds")
        )
        print(f"{self.name}: resumed at step {self.step}", flush=True)

    def _save(self) -> None:
        partial = self.path.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "training": self.training(),
                "identity": self.identity,
            },
            partial,
        )
        os.replace(partial, self.path)

    def training(self) -> dict[str, float]:
        """What the training has taken so far."""
        return {"steps": self.step, "tokens": self.tokens, "cpu_seconds": round(self.cpu_seconds, 1)}

    def train(self) -> LlamaForCausalLM:
        """Runs the remaining steps."""
        saved = logged = time.monotonic()
        losses: list[float] = []
        while self.step < self.recipe.steps:
            started = time.process_time()
            losses.append(self._one_step())
            self.cpu_seconds += time.process_time() - started
            if self.step % self.LOG_STEPS == 0:
                self._log(sum(losses) / len(losses), time.monotonic() - logged, len(losses))
                losses, logged = [], time.monotonic()
            if time.monotonic() - saved > self.SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
        self._save()
        return self.model

    def _one_step(self) -> float:
        phase = self.recipe.phase(self.step)
        rows = max(1, self.recipe.batch_tokens // phase.length)
        data = batch(self.tokenizer, self.seed, self.step, rows, phase.length, phase.mixture, self.recipe.answer_weight)
        value = loss(self.model, data, guided=self.step < self.recipe.guided_steps)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, base in zip(self.optimizers, self.base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base * self.recipe.lr_scale(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += data.inputs.numel()
        return value.item()

    def _log(self, value: float, seconds: float, steps: int) -> None:
        recalls = " ".join(
            f"recall@{length} {recall_accuracy(self.model, self.tokenizer, tasks):.2f}"
            for length, tasks in self.probes.items()
        )
        rate = steps * self.recipe.batch_tokens / seconds
        print(
            f"{self.name} {self.step}/{self.recipe.steps} loss {value:.3f} {recalls} "
            f"length {self.recipe.phase(self.step).length} {rate:.0f} tokens/s",
            flush=True,
        )


def ship(run: Run, out: Path) -> None:
    """Writes the bf16 checkpoint, the tokenizer, and what the training took."""
    folder, facts = out / run.name, out / TRAINING
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(run.model).to(torch.bfloat16).save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    training = json.loads(facts.read_text()) if facts.exists() else {}
    facts.write_text(json.dumps(training | {run.name: run.training()}, indent=1) + "\n")


def load_tokenizer(work: Path, seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer, trained at the first call."""
    folder = work / "tokenizer"
    if not folder.exists():
        train_tokenizer(seed).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def write_text(out: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """The held-out calibration and evaluation files."""
    for split, count in (("calibration", CALIBRATION_DOCUMENTS), ("evaluation", EVALUATION_DOCUMENTS)):
        write_jsonl(out / "text" / f"{split}.jsonl.gz", held_out_documents(tokenizer, split, seed, count))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(kvbridge.embedded.__file__).parent)
    parser.add_argument("--work", type=Path, default=Path("embedded_checkpoints"), help="state for resuming")
    parser.add_argument("--only", choices=("source", "target", "text", "measure"))
    parser.add_argument("--steps", type=int, help="training steps instead of the recipe's")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Trains, ships and measures what is asked for."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.only != "measure":
        make(arguments)
    if arguments.only in (None, "measure"):
        training = json.loads((arguments.out / TRAINING).read_text())
        print(json.dumps(measure_pair(arguments.out, training, arguments.seed), indent=1), flush=True)


def make(arguments: argparse.Namespace) -> None:
    """Writes the text, trains and ships, as far as it is asked for."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(arguments.work, arguments.seed)
    if arguments.only in (None, "text"):
        write_text(arguments.out, tokenizer, arguments.seed)
    for name, recipe in RECIPES.items():
        if arguments.only in (None, name):
            recipe = replace(recipe, steps=arguments.steps or recipe.steps)
            run = Run(name, recipe, tokenizer, arguments.seed, arguments.work)
            run.train()
            ship(run, arguments.out)


if __name__ == "__main__":
    main()
