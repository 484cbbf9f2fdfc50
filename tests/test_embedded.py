"""The shipped pair: as small, as different and as capable as its cards say, and the main job runs on it."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module

from kvbridge import ModelPair, cli, embedded, load_pair
from kvbridge.calibration import CalibrationConfig, CorpusConfig, calibrate
from kvbridge.cli.commands import Settings
from kvbridge.cli.settings import register
from kvbridge.embedded.language import Task, recall_task
from kvbridge.errors import UsageError
from kvbridge.eval import EvalConfig, evaluate, identity_gate
from kvbridge.eval.arms import injected_arm, mapped_arm, other_document_arm
from kvbridge.eval.documents import take_documents
from kvbridge.eval.results import summarise_arms
from kvbridge.kernels import FormMap
from kvbridge.mappers import Random, Ridge
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan

FOLDERS = {"source": embedded.SOURCE, "target": embedded.TARGET}
MEGABYTES = 25


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return load_pair("embedded", dtype="float32")


def texts(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def card_figure(role: str, row: str) -> float:
    """The figure of a role in a table row of its model card."""
    line = next(
        line for line in (FOLDERS[role] / "README.md").read_text().splitlines() if line.startswith(f"| {row} |")
    )
    return float(line.split("|")[2 if role == "source" else 3])


@torch.no_grad()
def mean_nll(model: KVModel, rows: torch.Tensor) -> float:
    logits = model.prefill(rows, logits_to_keep=rows.shape[1])[1][:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_is_small_and_differs_in_every_dimension(pair: ModelPair) -> None:
    weights = sum((folder / "model.safetensors").stat().st_size for folder in FOLDERS.values())
    text = sum(path.stat().st_size for path in (embedded.CALIBRATION_TEXT, embedded.EVALUATION_TEXT))
    assert weights < MEGABYTES * 1e6
    assert text < 3e6
    source, target = pair.source.geometry, pair.target.geometry
    for name in ("layers", "kv_heads", "head_dim"):
        assert getattr(source, name) != getattr(target, name)
    assert {source.head_dim, target.head_dim} <= {32, 64}
    hidden = [side.model.config.hidden_size for side in (pair.source, pair.target)]
    assert hidden[0] != hidden[1]


@pytest.mark.parametrize("role", FOLDERS)
def test_no_training_state_or_pickle_is_shipped(role: str) -> None:
    names = {path.name for path in FOLDERS[role].iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_the_large_model_reads_its_text_better(pair: ModelPair) -> None:
    documents = [record["text"] for record in texts(embedded.EVALUATION_TEXT)[:16]]
    rows = torch.tensor([pair.tokenizer(text)["input_ids"][:512] for text in documents])
    found = {role: mean_nll(getattr(pair, role), rows) for role in FOLDERS}
    assert found["source"] - found["target"] > 0.2
    for role, nll in found.items():
        assert nll == pytest.approx(card_figure(role, "first 512 tokens"), abs=0.1)


def said(model: KVModel, pair: ModelPair, task: Task) -> str:
    """The greedy answer of a model, as long as the right one."""
    ids = torch.tensor([pair.tokenizer(f"{task.context} {task.question}")["input_ids"]])
    count = len(pair.tokenizer(f" {task.answer}.", add_special_tokens=False)["input_ids"])
    cache, logits = model.prefill(ids)
    tokens = [logits[0, -1].argmax()]
    while len(tokens) < count:
        following = model.extend(cache, tokens[-1][None, None], ids.shape[1] + len(tokens) - 1)
        tokens.append(following[0, -1].argmax())
    return str(pair.tokenizer.decode(tokens))


@pytest.mark.parametrize(("role", "least"), [("source", 0.6), ("target", 0.95)])
def test_recalls_facts_from_its_context(pair: ModelPair, role: str, least: float) -> None:
    rng = random.Random("test_recall")
    tasks = [recall_task(rng, 4, 205) for _ in range(40)]
    right = sum(said(getattr(pair, role), pair, task) == f" {task.answer}." for task in tasks)
    assert right / len(tasks) >= least - 0.05
    assert card_figure(role, "recall, 4 facts, 256 tokens") >= least


@pytest.mark.parametrize("role", FOLDERS)
def test_passes_the_gate_and_its_controls(pair: ModelPair, role: str) -> None:
    ids = torch.randint(2, 2048, (1, 160), generator=torch.Generator().manual_seed(0))
    report = identity_gate(getattr(pair, role), ids)
    assert report.passed
    assert min(report.controls.values()) > 100 * report.limit


def test_calibration_and_evaluation_text_do_not_meet(pair: ModelPair) -> None:
    calibration, evaluation = texts(embedded.CALIBRATION_TEXT), texts(embedded.EVALUATION_TEXT)
    assert not {r["id"] for r in calibration} & {r["id"] for r in evaluation}
    assert not {r["text"] for r in calibration} & {r["text"] for r in evaluation}
    # Enough blocks for the default calibration with its held-out split, and documents for the default evaluation.
    assert len(calibration) >= 122_880 * 1.1 / 512
    assert all(len(pair.tokenizer(r["text"])["input_ids"]) >= 512 for r in calibration[:20] + evaluation[:40])
    for group, path in (("calibration", embedded.CALIBRATION_TEXT), ("eval", embedded.EVALUATION_TEXT)):
        first = next(CorpusConfig("embedded").open(group).in_order())
        assert first == (texts(path)[0]["id"], texts(path)[0]["text"])


def test_brings_its_own_target() -> None:
    with pytest.raises(UsageError, match="brings its own target; somewhere needs a source of its own"):
        load_pair("embedded", "somewhere")
    with pytest.raises(UsageError, match=r"pair\.target is missing for pair\.source=somewhere"):
        load_pair("somewhere")


@pytest.fixture
def registered() -> Iterator[None]:
    register()
    with initialize_config_module("kvbridge.configs", version_base="1.3"):
        yield


@pytest.mark.usefixtures("registered")
@pytest.mark.filterwarnings("ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")
def test_is_the_default_and_its_text_is_no_other_pairs() -> None:
    settings = Settings.of(compose("config", overrides=["out=x"]))
    assert settings.pair.source == settings.calibration.corpus == settings.eval.corpus == "embedded"
    given = ["pair=local", "pair.source=A", "pair.target=B", "eval.corpus=embedded", "out=x"]
    with pytest.raises(UsageError, match=r"eval\.corpus=embedded is the embedded pair's text, and pair\.source=A"):
        Settings.of(compose("config", overrides=given))
    given = ["pair.source=A", "pair.target=B", "calibration.corpus=C", "eval.corpus=D", "out=x"]
    with pytest.raises(UsageError, match=r"eval\.probes\.language=embedded is the embedded pair's language"):
        Settings.of(compose("config", overrides=given))


def test_the_main_job_tells_a_map_from_its_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (
        "calibration.tokens=61440", "eval.documents=8", "eval.rollout=8", "eval.resamples=200",
        "eval.probes.count=1", "eval.probes.lengths=[128]", "mapper.k=4",
    )  # fmt: skip
    monkeypatch.setattr("sys.argv", ["kvbridge", "run", *sizes, f"out={tmp_path}"])
    cli.main()
    results = json.loads((tmp_path / "results.json").read_text())
    kl = {arm: results["arms"][arm]["kl"]["mean"] for arm in results["arms"]}
    assert kl["injected"] < 1e-6
    assert kl["mapped"] < 0.5 * min(kl[arm] for arm in ("other_document", "no_context"))
    assert kl["mapped"] < kl["tail_only"]
    assert results["probes"]["settings"]["language"] == "embedded"
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"<h2>What the cache still holds</h2>", page)
    assert "report:" in capsys.readouterr().out


@pytest.fixture(scope="module")
def scores(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The published ridge with layer 0 mapped, and everything that must be worse than it, on 16 documents."""
    plan, folder = HandoffPlan(sinks=4, native_head=None, native_tail=1), tmp_path_factory.mktemp("controls")
    sizes: dict[str, Any] = {"corpus": "embedded", "tokens": 61_440, "block": 512, "held_out": 0.0, "batch": 4}
    maps: dict[str, FormMap] = {}
    for pairing, mappers in (
        ("same", {"mapped": Ridge(k=4), "random": Random()}),
        ("shuffled", {"shuffled": Ridge(k=4)}),
    ):
        moments = calibrate(pair, CalibrationConfig(pairing=pairing, **sizes), Ridge().blocks(), folder / pairing)
        assert moments is not None
        for name, mapper in mappers.items():
            fitted = mapper.fit(moments, pair.source.geometry, pair.target.geometry)
            maps[name] = FormMap(fitted.forms)
    arms = {name: mapped_arm(pair, mapping, plan) for name, mapping in maps.items()}
    arms |= {
        "other_document": other_document_arm(pair, maps["mapped"], plan),
        "injected": injected_arm(pair, plan),
        "source": lambda context: context.source,
    }
    corpus, config = (
        CorpusConfig("embedded").open("eval"),
        EvalConfig(documents=16, rollout=1, resamples=1000, samples=0),
    )
    documents = take_documents(corpus, pair.tokenizer, documents=16, tokens=512, prompt=448)
    records = evaluate(pair, arms, documents, config, partial=folder / "documents.jsonl", identity={})
    return summarise_arms(records, config)


@pytest.mark.parametrize("control", ["shuffled", "random", "other_document"])
def test_controls_are_twice_as_far_and_worse_than_the_source(scores: dict[str, Any], control: str) -> None:
    kl = {arm: metrics["kl"] for arm, metrics in scores.items()}
    assert kl[control]["mean"] > 2 * kl["mapped"]["mean"]
    assert kl[control]["ci95"][0] > max(kl["source"]["ci95"][1], kl["mapped"]["ci95"][1])


def test_the_targets_own_states_score_as_native(scores: dict[str, Any]) -> None:
    assert scores["injected"]["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert scores["injected"]["top1"]["mean"] == 1
