"""Residual branches before and after their training: units, text, schedule, the form that is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge.calibration import CalibrationMoments, CorpusConfig
from kvbridge.errors import CalibrationError, CorpusError, UsageError
from kvbridge.kernels import FormMap
from kvbridge.mappers import Ridge
from kvbridge.mappers.residual import training_plan, training_text
from kvbridge.mappers.residual.mapping import branch_inputs, branch_outputs
from kvbridge.mappers.residual.schedule import Schedule, rate
from kvbridge.mappers.residual.units import units_of
from kvbridge.mappers.residual_config import KINDS_OF_BRANCH, ResidualConfig
from kvbridge.plan import HandoffPlan
from tiny_models import relative_error
from tiny_pair import write_corpus
from tiny_residual import CONFIG, PLAN, Fitted, disturbed


@pytest.mark.parametrize("kind", KINDS_OF_BRANCH)
def test_an_untrained_branch_leaves_the_frozen_map_as_it_is(fitted: Fitted, kind: str) -> None:
    mapping, readings = fitted.adapted(kind), fitted.readings()
    made = mapping.mapped(readings, 48)
    source, native = readings.source.span(4, 48), mapping.native(readings, 4, 48)
    for forms in (fitted.forms, (*fitted.forms, mapping.branch())):
        exact = FormMap(forms).apply(source, PLAN.mapped_layers(4), native)
        assert torch.equal(made.keys, exact.keys)
        assert torch.equal(made.values, exact.values)


@pytest.mark.parametrize("directions", [None, 40], ids=["spread", "directions"])
@pytest.mark.parametrize("kind", KINDS_OF_BRANCH)
def test_the_form_makes_what_was_trained(fitted: Fitted, kind: str, directions: int | None) -> None:
    mapping, readings = disturbed(fitted.adapted(kind, directions), 0.3), fitted.readings()
    made = mapping.mapped(readings, 48)
    source, native = readings.source.span(4, 48), mapping.native(readings, 4, 48)
    frozen_map = mapping.forms.apply(source, PLAN.mapped_layers(4), native)
    whole = FormMap((*fitted.forms, mapping.branch())).apply(source, PLAN.mapped_layers(4), native)
    assert relative_error(made.keys.detach(), frozen_map.keys) > 0.01
    for given, wanted in ((whole.keys, made.keys), (whole.values, made.values)):
        assert relative_error(given, wanted.detach()) < 1e-5


def test_features_have_unit_variance(fitted: Fitted) -> None:
    inputs = branch_inputs(fitted.forms, fitted.pair.source.geometry)
    fit = fitted.moments.select("fit", first=False)
    units = units_of(fitted.moments, inputs, branch_outputs(PLAN, fitted.pair.target.geometry), 40)
    names = [str(span) for span in inputs]
    covariance = fit.gram(names).float() / fit.rows
    weight = units.on_inputs(torch.eye(40))
    torch.testing.assert_close(weight.T @ covariance @ weight, torch.eye(40), atol=2e-2, rtol=0)
    torch.testing.assert_close(units.features(fit.means(names).float()), torch.zeros(40), atol=1e-3, rtol=0)


def test_directions_need_the_products_of_what_is_read(fitted: Fitted) -> None:
    geometry = fitted.pair.target.geometry
    bare = CalibrationMoments(
        {at: replace(one, cross={}) for at, one in fitted.moments.sets.items()}, fitted.moments.info
    )
    inputs, outputs = branch_inputs(fitted.forms, fitted.pair.source.geometry), branch_outputs(PLAN, geometry)
    with pytest.raises(CalibrationError, match=r"directions=40 needs .* give mapper\.residual\.directions=null"):
        units_of(bare, inputs, outputs, 40)
    assert units_of(bare, inputs, outputs, None).width == sum(
        span.width(geometry if span.role == "target" else fitted.pair.source.geometry) for span in inputs
    )


def test_a_map_of_slots_has_a_branch_that_reads_all_slots(fitted: Fitted) -> None:
    ridge = Ridge(k=1).fit(fitted.moments, fitted.pair.source.geometry, fitted.pair.target.geometry)
    inputs = branch_inputs(ridge.forms, fitted.pair.source.geometry)
    assert [str(span) for span in inputs] == ["source.keys[0:3]", "source.values[0:3]"]


def test_fresh_text_is_what_the_moments_have_not_seen(fitted: Fitted) -> None:
    tokenizer = fitted.pair.tokenizer
    fresh = training_text(fitted.moments, fitted.calibration, CONFIG, tokenizer)
    seen = training_text(fitted.moments, fitted.calibration, replace(CONFIG, fresh=False, documents=100), tokenizer)
    rows = {name: {tuple(row.tolist()) for row in part} for name, part in
            (("fresh", fresh.training), ("dev", fresh.dev), ("seen", seen.training))}  # fmt: skip
    assert torch.equal(fresh.dev, seen.dev)
    assert {name: len(part) for name, part in rows.items()} == {"fresh": 6, "dev": 2, "seen": 32}
    assert not rows["fresh"] & rows["dev"]
    assert not (rows["fresh"] | rows["dev"]) & rows["seen"]
    longer = training_text(fitted.moments, fitted.calibration, replace(CONFIG, block=100), tokenizer)
    assert longer.training.shape == (6, 100)
    assert torch.equal(longer.training[:, :64], fresh.training)
    with pytest.raises(CorpusError, match=r"has 24 documents of 64 tokens .* fewer mapper\.residual\.documents"):
        training_text(fitted.moments, fitted.calibration, replace(CONFIG, documents=40), tokenizer)


def test_a_chat_goes_around_the_text(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, config = fitted.pair.tokenizer, replace(CONFIG, chat=True)
    with pytest.raises(UsageError, match=r"chat=true: .* has no chat template; give mapper\.residual\.chat=false"):
        training_text(fitted.moments, fitted.calibration, config, tokenizer)
    raw = training_text(fitted.moments, fitted.calibration, CONFIG, tokenizer)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<answer>"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    framed = training_text(fitted.moments, fitted.calibration, config, tokenizer)
    before, after = (tokenizer(text)["input_ids"] for text in ("<user>", "<end><answer>"))
    room = 64 - len(before) - len(after)
    for part, plain in ((framed.training, raw.training), (framed.dev, raw.dev)):
        assert part.tolist() == [[*before, *row[:room].tolist(), *after] for row in plain]
    with pytest.raises(UsageError, match=r"block=16: the chat template alone takes 19 tokens"):
        training_text(fitted.moments, fitted.calibration, replace(config, block=16), tokenizer)


def test_every_document_comes_once_before_any_comes_again() -> None:
    schedule = Schedule(CONFIG, 8, 64, 4)
    steps = [schedule.batches(0, step) for step in range(2)]
    assert sorted(document for step in steps for batch in step for document in batch.documents) == list(range(8))
    assert steps[1] == schedule.batches(0, 1)
    assert steps[0] != schedule.batches(1, 0)
    assert all(20 <= start <= 56 for step in steps for batch in step for start in batch.starts)
    with pytest.raises(UsageError, match=r"suffix=50: documents of 64 tokens leave no room"):
        Schedule(replace(CONFIG, suffix=50), 8, 64, 4)


def test_the_rate_rises_and_falls() -> None:
    rates = [rate(step, 100, 10, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 1e-3


def test_the_plan_of_training_has_the_head_that_the_map_reads(fitted: Fitted) -> None:
    given = HandoffPlan(native_head=None, native_attended=0.2)
    assert training_plan(fitted.forms, given) == HandoffPlan(native_head=0, native_tail=1)
    assert training_plan((), given).native_head is None


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "cubic"}, {"rank": 0}, {"loss": "l1"}, {"learning_rate": 0.0}, {"warmup": -1}, {"steps": 0},
     {"on_policy_steps": -1}, {"unfreeze_rate": 0.0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=rf"mapper\.residual\.{name}="):
        ResidualConfig(**wrong)


def test_another_text_than_that_of_the_moments_is_refused(fitted: Fitted, tmp_path: Path) -> None:
    other = CorpusConfig(str(write_corpus(tmp_path / "other.jsonl", seed=1)))
    with pytest.raises(CalibrationError, match="give the same text"):
        training_text(fitted.moments, other, CONFIG, fitted.pair.tokenizer)
