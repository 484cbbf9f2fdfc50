"""What the target's attention makes of errors: against explicit sums, however it is gathered, and what a fit gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge import compat
from kvbridge.attention import output_projections, queried_backbone
from kvbridge.calibration import ATTENTION, AttentionMetric, CalibrationConfig, CalibrationMoments, calibrate
from kvbridge.calibration.queries import DISTANCES, measure_attention
from kvbridge.calibration.sums import FIRST_POSITIONS, Summation
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.mappers import Joint, ReducedRank
from kvbridge.mappers.error_units import METRICS, RIDGE, error_units
from kvbridge.mappers.joint_inputs import JointProblem
from kvbridge.mappers.residual.losses import attend
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from kvbridge.variables import Span
from tiny_models import ARCHITECTURES, kv_model, random_ids
from tiny_pair import sentences, tiny_pair, write_corpus

pytestmark = pytest.mark.usefixtures("own_dataset_cache")

BLOCK = 32
MAPPER = ReducedRank(rank=12, metric="attention", joint=Joint(boundary=3))


def queries_of(model: KVModel, ids: Tensor) -> Tensor:
    """The target's own queries `[L, B, H_q, T, D]`, rotated and scaled."""
    found: list[Tensor] = []
    with torch.no_grad():
        compat.run(queried_backbone(model.model, found.append), ids, compat.empty_cache(model.model))
    return torch.stack(found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mean_over_distances_is_the_explicit_sum(architecture: str) -> None:
    model, distances = kv_model(architecture), (0, 1, 5, 100)
    width = model.geometry.head_dim
    queries, error = torch.randn(20, width), torch.randn(width)
    exact = replace(model.rotary, dtype=torch.float32)
    seen = 0.0
    for distance in distances:
        rotated = exact.apply(queries[:, None], torch.tensor([37 + distance]))[:, 0]
        logits = rotated @ exact.apply(error[None], torch.tensor([37]))[0]
        seen += float(logits.square().mean()) / len(distances)
    second = queries.double().T @ queries.double() / len(queries)
    (found,) = model.rotary.seen_from(second[None], distances)
    assert float(error.double() @ found @ error.double()) == pytest.approx(seen, rel=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_neox", "llama-yarn"])
def test_the_metric_is_the_sum_over_query_heads_and_distances(architecture: str) -> None:
    model, ids = kv_model(architecture), random_ids(24, batch=2)
    geometry, later = model.geometry, slice(FIRST_POSITIONS, None)
    found = measure_attention(model, [ids[:1], ids[1:]])
    content = model.content(model.read(ids))
    positions = torch.arange(ids.shape[1])
    queries = model.rotary.strip(queries_of(model, ids), positions)[..., later, :]
    distances = [distance for distance in DISTANCES if distance < geometry.max_positions]
    exact, group = replace(model.rotary, dtype=torch.float32), geometry.query_heads // geometry.kv_heads
    error = torch.randn(geometry.head_dim)
    for layer, weight in enumerate(output_projections(model.model)):
        expected: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for head in range(geometry.kv_heads):
            keys = values = 0.0
            for query in range(head * group, (head + 1) * group):
                mine = queries[layer, :, query].flatten(0, 1)
                for distance in distances:
                    rotated = exact.apply(mine[:, None], torch.tensor([distance]))[:, 0]
                    keys += float((rotated @ exact.apply(error[None], torch.tensor([0]))[0]).square().mean())
                columns = slice(query * geometry.head_dim, (query + 1) * geometry.head_dim)
                values += float((weight.detach()[:, columns] @ error).square().sum())
            expected["keys"].append(keys)
            expected["values"].append(values)
        for kind in KINDS:
            metric = getattr(found, kind)[layer]
            counted = torch.einsum("d,hde,e->h", error.double(), metric, error.double())
            ratio = counted / torch.tensor(expected[kind], dtype=torch.float64)
            assert float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-4)
            rows = getattr(content, kind)[layer][..., later, :].transpose(0, 1).flatten(1, 2).double()
            rows = rows - rows.mean(dim=1, keepdim=True)
            varies = torch.einsum("hnd,hde,hne->hn", rows, metric, rows).mean(dim=1).sum()
            assert float(varies) == pytest.approx(1, rel=1e-4)


# Gathered beside the moments


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=44, words=14)


def settings_of(corpus: Path, **changed: Any) -> CalibrationConfig:
    usual: dict[str, Any] = {"tokens": 40 * BLOCK, "block": BLOCK, "held_out": 0.1, "checkpoint_seconds": 0.0}
    return CalibrationConfig(str(corpus), **(usual | changed))


def collect(pair: ModelPair, config: CalibrationConfig, out: Path) -> CalibrationMoments:
    moments = calibrate(pair, config, MAPPER.blocks(), out)
    assert moments is not None
    return moments


@pytest.fixture(scope="module")
def moments(pair: ModelPair, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationMoments:
    return collect(pair, settings_of(corpus), tmp_path_factory.mktemp("moments"))


def same_metric(found: AttentionMetric | None, expected: AttentionMetric | None) -> bool:
    assert found is not None
    assert expected is not None
    return all(torch.equal(getattr(found, kind), getattr(expected, kind)) for kind in KINDS)


@pytest.mark.parametrize("changed", [{"stage": True, "memory_gb": 0.003}, {"shard": "0/2"}], ids=["staged", "shards"])
def test_it_is_the_same_however_moments_are_collected(
    pair: ModelPair, corpus: Path, tmp_path: Path, moments: CalibrationMoments, changed: dict[str, Any]
) -> None:
    config = settings_of(corpus, **changed)
    if config.shard is not None:
        for shard in ("0/2", "1/2"):
            calibrate(pair, replace(config, shard=shard), MAPPER.blocks(), tmp_path)
        config = replace(config, shard=None)
    found = collect(pair, config, tmp_path)
    assert same_metric(found.attention, moments.attention)
    assert [path.name for path in tmp_path.iterdir()] == ["moments.safetensors"]
    assert same_metric(CalibrationMoments.load(tmp_path / "moments.safetensors").attention, moments.attention)
    assert found.info["identity"] == moments.info["identity"]


def killed(*_: Any) -> None:
    raise KeyboardInterrupt


def collect_until_killed(
    pair: ModelPair,
    config: CalibrationConfig,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    add: Callable[..., None],
) -> None:
    """Collect with another way to add a batch, which ends the run."""
    with monkeypatch.context() as patch:
        patch.setattr(Summation, "_add", add)
        with pytest.raises(KeyboardInterrupt):
            collect(pair, config, folder)


def test_a_resumed_run_does_not_measure_again(
    pair: ModelPair, corpus: Path, tmp_path: Path, moments: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_until_killed(pair, settings_of(corpus), tmp_path, monkeypatch, killed)
    monkeypatch.setattr("kvbridge.calibration.queries.measure_attention", killed)
    assert same_metric(collect(pair, settings_of(corpus), tmp_path).attention, moments.attention)


def test_a_run_that_goes_on_from_a_checkpoint_has_the_metric(
    pair: ModelPair, corpus: Path, tmp_path: Path, moments: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, config = Summation._add, settings_of(corpus, checkpoint_seconds=0.0)

    def killed_later(work: Summation, *given: Any) -> None:
        if work.checkpoint.exists():
            raise KeyboardInterrupt
        add(work, *given)

    collect_until_killed(pair, config, tmp_path, monkeypatch, killed_later)
    assert (tmp_path / "moments.safetensors.progress").exists()
    collect(pair, config, tmp_path)
    assert same_metric(CalibrationMoments.load(tmp_path / "moments.safetensors").attention, moments.attention)


def test_the_metric_of_another_run_is_not_taken(
    pair: ModelPair, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_until_killed(pair, settings_of(corpus), tmp_path, monkeypatch, killed)
    with pytest.raises(CalibrationError, match="seed"):
        collect(pair, settings_of(corpus, seed=1), tmp_path)


def test_moments_that_nobody_asked_it_of_stay_what_they_were(
    pair: ModelPair, corpus: Path, tmp_path: Path, moments: CalibrationMoments
) -> None:
    plain = replace(MAPPER, metric="head")
    without = calibrate(pair, settings_of(corpus), plain.blocks(), tmp_path)
    assert without is not None
    assert plain.blocks() == MAPPER.blocks() - {ATTENTION}
    assert without.attention is None
    asked, known = moments.info["identity"], without.info["identity"]
    assert [key for key in asked if asked[key] != known[key]] == ["moment blocks"]
    assert set(asked["moment blocks"]) - set(known["moment blocks"]) == {"attention×attention"}
    moments.require(plain.blocks())
    for refused in (
        lambda: without.require(MAPPER.blocks()),
        lambda: MAPPER.fit(without, pair.source.geometry, pair.target.geometry),
    ):
        with pytest.raises(CalibrationError, match=r"^these moments hold no metric of attention; calibrate with"):
            refused()
    with pytest.raises(CalibrationError, match=r"cannot be resumed"):
        collect(pair, settings_of(corpus), tmp_path)


# In the regression


def problem_of(pair: ModelPair, moments: CalibrationMoments) -> JointProblem:
    return JointProblem.of(moments, pair.source.geometry, pair.target.geometry, None, 3)


@pytest.mark.parametrize("metric", METRICS)
def test_units_are_roots_of_the_metric(pair: ModelPair, moments: CalibrationMoments, metric: str) -> None:
    problem = problem_of(pair, moments)
    spans = [Span("target.keys", 1, 2), Span("target.values", 2, 3), Span("target.residual", 3, 4)]
    given = moments.attention if metric == "attention" else None
    units = error_units(problem, spans, metric, 2.0, given)
    rows = torch.randn(5, sum(span.width(pair.target.geometry) for span in spans))
    counted = units.counted(rows)
    torch.testing.assert_close(units.restored(counted), rows, rtol=1e-4, atol=1e-4)
    squares = counted.split([span.width(pair.target.geometry) for span in spans], dim=1)
    keys, values, residual = (part.square().sum(dim=1) for part in squares)
    if given is None:
        plain = error_units(problem, spans, metric, 1.0, None).counted(rows)
        torch.testing.assert_close(keys, 2 * plain[:, :128].square().sum(dim=1))
        torch.testing.assert_close(counted[:, 128:], plain[:, 128:])
        return
    heads = rows[:, :256].double().unflatten(1, (2, 4, 32))
    for found, square, error, weight in (
        (keys, given.keys[1], heads[:, 0], 2.0),
        (values, given.values[2], heads[:, 1], 1.0),
    ):
        wanted = torch.einsum("nhd,hde,nhe->n", error, square, error)
        wanted += RIDGE * float(square.diagonal(dim1=1, dim2=2).mean()) * error.square().sum(dim=(1, 2))
        torch.testing.assert_close(found.double(), weight * wanted, rtol=1e-4, atol=1e-6)
    spread = (problem.fit.squares([spans[2]]) / problem.fit.rows).sqrt()
    wanted = 2 * (rows[:, 256:] / spread).square().mean(dim=1)
    torch.testing.assert_close(residual.double(), wanted, rtol=1e-4, atol=1e-6)


def test_a_head_that_nobody_reads_can_be_divided_by(pair: ModelPair, moments: CalibrationMoments) -> None:
    none = AttentionMetric(
        torch.zeros(4, 4, 32, 32, dtype=torch.float64), torch.zeros(4, 4, 32, 32, dtype=torch.float64)
    )
    units = error_units(problem_of(pair, moments), [Span("target.keys", 1, 2)], "attention", 1.0, none)
    rows = torch.randn(3, 128)
    torch.testing.assert_close(units.restored(units.counted(rows)), rows)


def attended(pair: ModelPair, ids: Tensor, mapper: Joint | ReducedRank, moments: CalibrationMoments) -> list[Tensor]:
    """What the mapped layers add to the residual stream for the target's own queries, the first positions exact."""
    target, layers = pair.target, range(1, 4)
    fitted = mapper.fit(moments, pair.source.geometry, target.geometry)
    source = pair.source.content(pair.source.read(ids))
    with compat.residual_streams(target.model, range(4)) as streams:
        native = target.content(target.read(ids))
    native = replace(native, residual=dict(streams))
    made = FormMap(fitted.forms).apply(source, layers, native)
    queries, positions = queries_of(target, ids)[1:], native.positions
    hidden = torch.zeros(len(ids), len(positions), len(positions))
    hidden.masked_fill_(positions > positions[:, None], -torch.inf)
    exact = positions[:, None] < FIRST_POSITIONS
    keys, values = (torch.where(exact, getattr(native, kind)[1:], getattr(made, kind)) for kind in KINDS)
    heads = attend(queries, target.rotary.apply(keys, positions), values, hidden)
    return [each @ weight.T for each, weight in zip(heads, output_projections(target.model)[1:], strict=True)]


def test_attention_loses_less_of_what_the_full_map_gives(pair: ModelPair, moments: CalibrationMoments) -> None:
    ids = torch.tensor([pair.tokenizer(each)["input_ids"][:BLOCK] for each in sentences(8, 14, seed=9)])
    lost = {}
    with torch.no_grad():
        whole = attended(pair, ids, Joint(), moments)
        for metric in METRICS:
            found = attended(pair, ids, ReducedRank(rank=16, metric=metric), moments)
            shares = [(a - b).square().sum() / b.square().sum() for a, b in zip(found, whole, strict=True)]
            lost[metric] = float(sum(shares)) / len(shares)
    assert lost["attention"] < 0.98 * min(lost["coordinate"], lost["head"]), lost


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf")])
def test_refuses_a_weight_that_is_none(weight: float) -> None:
    with pytest.raises(UsageError, match=r"^mapper\.key_weight=.*: expected a positive number\.$"):
        ReducedRank(key_weight=weight)
