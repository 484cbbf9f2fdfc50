"""Training residual branches: readings, suffixes with gradients, losses, resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge import compat
from kvbridge.assembly import hand_off
from kvbridge.attention import queried_backbone
from kvbridge.calibration import CalibrationMoments, calibrate
from kvbridge.errors import CalibrationError, TrainingError, UnsupportedModelError, UsageError
from kvbridge.kernels import FormMap
from kvbridge.mappers import Joint, residual_config
from kvbridge.mappers.residual import finish, losses, train_residual
from kvbridge.mappers.residual.losses import LOSSES, attend, kl_loss, mean_divergence, on_policy_queries
from kvbridge.mappers.residual.mapping import AdaptedMap
from kvbridge.mappers.residual.readings import ReadingStore, require_linear_head
from kvbridge.mappers.residual.suffixes import carried_cache, frozen, read_suffixes
from kvbridge.mappers.residual.trainer import Trainer
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from tiny_models import kv_model, random_ids, relative_error, tiny_model
from tiny_pair import tiny_pair
from tiny_residual import CONFIG, PLAN, Fitted, disturbed, trainer


@pytest.mark.parametrize("recomputed", [0, 2], ids="recompute-{}".format)
def test_suffixes_read_what_hand_offs_do(fitted: Fitted, recomputed: int) -> None:
    if recomputed:
        forms = (
            Joint(boundary=2)
            .fit(_with_boundary(fitted), fitted.pair.source.geometry, fitted.pair.target.geometry)
            .forms
        )
        fitted = replace(fitted, forms=forms)
    plan = replace(PLAN, tail_recompute=recomputed)
    mapping, readings, target = disturbed(fitted.adapted(plan=plan)), fitted.readings(), fitted.pair.target
    starts, suffix = [30, 41], plan.native_tail
    with frozen(target):
        cached = carried_cache(target, plan, readings, mapping.mapped(readings, max(starts)))
        output = read_suffixes(target, cached, readings.input_ids, starts, suffix)
    assert output.requires_grad
    logits = compat.head_logits(target.model, output).detach().unflatten(1, (2, suffix))[:, :, -1]
    whole = FormMap((*fitted.forms, mapping.branch()))
    for at, start in enumerate(starts):
        prompt = readings.input_ids[:, : start + suffix]
        source = fitted.pair.source.content(fitted.pair.source.read(prompt))
        handed = hand_off(target, plan, whole, source, prompt)
        assert relative_error(logits[:, at], handed.logits) < 1e-4
        native = target.prefill(prompt)[1][:, -1]
        assert relative_error(native, handed.logits) > 1e-2


def _with_boundary(fitted: Fitted) -> CalibrationMoments:
    found = calibrate(
        fitted.pair, fitted.calibration, Joint(boundary=2).blocks(), fitted.store.folder.parent / "boundary"
    )
    assert found is not None
    return found


def test_the_stored_output_gives_native_logits(fitted: Fitted) -> None:
    target, readings = fitted.pair.target, fitted.readings()
    with torch.no_grad():
        made = compat.head_logits(target.model, readings.output)
    _, logits = target.prefill(readings.input_ids, logits_to_keep=readings.tokens)
    torch.testing.assert_close(made, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gpt_neox", "olmo2"])
def test_recorded_queries_give_the_attention_of_the_model(architecture: str, tmp_path: Path) -> None:
    model, ids = kv_model(architecture), random_ids(24, batch=2)
    pair = ModelPair(model, model, tiny_pair().tokenizer, "tokens")
    store = ReadingStore(pair, tmp_path, (), 9, 2)
    store.prepare(ids)
    readings = store.load(list(ids))
    found: list[Tensor] = []
    names = ("o_proj", "dense")
    handles = [
        part.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        for name, part in model.model.named_modules()
        if name.rsplit(".", 1)[-1] in names
    ]
    model.read(ids)
    for handle in handles:
        handle.remove()
    later = torch.arange(24) > readings.queried[..., None]
    hidden = torch.zeros(later.shape).masked_fill_(later, -torch.inf)
    made = attend(readings.queries, readings.keys, readings.values, hidden)
    wanted = torch.stack(found)[:, torch.arange(2)[:, None], readings.queried]
    assert made.shape == wanted.shape
    assert relative_error(made, wanted) < 1e-5


def test_a_target_that_scales_its_logits_is_refused() -> None:
    model = KVModel.wrap(tiny_model("cohere-interleaved", logit_scale=0.25))
    with pytest.raises(UnsupportedModelError, match="does more to its logits"):
        require_linear_head(model, random_ids(8))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("unfrozen", [False, True], ids=["branch", "unfrozen"])
def test_gradients_reach_what_is_trained_and_nothing_else(
    fitted: Fitted, loss: str, unfrozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, readings = disturbed(fitted.adapted(), 0.2), fitted.readings()
    mapping = mapping.with_unfrozen() if unfrozen else mapping
    parameters = list(mapping.parameters().values())
    # No gradient goes through the queries that the target has on its way.
    queries = on_policy_queries(mapping, readings, mapping.mapped(readings, 40), [24, 40], 8)
    monkeypatch.setattr(losses, "on_policy_queries", lambda *_: queries)

    def value() -> Tensor:
        return LOSSES[loss](mapping, readings, [24, 40], 8)

    with frozen(fitted.pair.target):
        value().backward()
    assert all(parameter.grad is None for parameter in fitted.pair.target.model.parameters())
    assert all(parameter.requires_grad for parameter in fitted.pair.target.model.parameters())
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    slope = sum(float(gradient.square().sum()) for gradient in gradients)
    size = 1e-2 / slope**0.5
    with torch.no_grad():
        ends = []
        for sign in (1, -2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(sign * size * gradient)
            ends.append(float(value()))
    assert (ends[0] - ends[1]) / (2 * size) == pytest.approx(slope, rel=0.05)


def test_the_kl_of_exact_states_is_none(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, readings, target = fitted.adapted(), fitted.readings(), fitted.pair.target
    exact = target.content(target.read(readings.input_ids)).layers(PLAN.mapped_layers(4))
    monkeypatch.setattr(AdaptedMap, "mapped", lambda self, given, stop: exact.span(PLAN.sinks, stop))
    for name, loss in LOSSES.items():
        assert float(loss(mapping, readings, [24, 40], 8).detach()) < 1e-6, name
    shifted = replace(exact, keys=exact.keys.roll(1, dims=3))
    monkeypatch.setattr(AdaptedMap, "mapped", lambda self, given, stop: shifted.span(PLAN.sinks, stop))
    for name, loss in LOSSES.items():
        assert float(loss(mapping, readings, [24, 40], 8).detach()) > 1e-3, name


def test_queries_on_the_way_are_native_where_the_cache_is(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, target = fitted.adapted(), fitted.pair.target
    store = replace(fitted.store, queries=16)
    store.prepare(fitted.documents)
    readings, starts = store.load(list(fitted.documents)), [24, 40]
    exact = target.content(target.read(readings.input_ids)).layers(PLAN.mapped_layers(4)).span(PLAN.sinks, 40)
    queries, picked = on_policy_queries(mapping, readings, exact, starts, 8)
    assert picked.tolist() == list(range(16))
    native: list[Tensor] = []
    with torch.no_grad():
        backbone = queried_backbone(target.model, native.append)
        compat.run(backbone, readings.input_ids, compat.empty_cache(target.model))
    wanted = torch.stack(native)[1:, ..., [*range(24, 32), *range(40, 48)], :]
    assert relative_error(queries, wanted) < 1e-4
    mapped, _ = on_policy_queries(mapping, readings, mapping.mapped(readings, 40), starts, 8)
    # The first mapped layer reads what native layers gave.
    assert relative_error(mapped[0], wanted[0]) < 1e-4
    assert relative_error(mapped[-1], wanted[-1]) > 1e-3


def curve(trained: Trainer) -> list[Any]:
    return [
        {name: value for name, value in look.items() if name != "seconds"} for look in trained.checkpoint.progress.curve
    ]


def test_losses_are_those_that_settings_know() -> None:
    assert tuple(LOSSES) == residual_config.LOSSES


def test_a_killed_training_ends_with_the_same_bits(
    fitted: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "attention_steps": 1, "steps": 2, "on_policy_steps": 1, "unfreeze_steps": 3, "unfreeze_rate": 1e-2,
        "checkpoint_seconds": 1e-6,
    }  # fmt: skip
    whole = trainer(fitted, tmp_path / "whole", **settings)
    whole.run()
    step: Callable[..., float] = Trainer._step
    for killed_at in (2, 3, 4, 6):

        def killed(self: Trainer, stage: Any, at: int = killed_at) -> float:
            if self._done() == at:
                raise KeyboardInterrupt
            return step(self, stage)

        monkeypatch.setattr(Trainer, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer(fitted, tmp_path / "parts", **settings).run()
    monkeypatch.setattr(Trainer, "_step", step)
    parts = trainer(fitted, tmp_path / "parts", **settings)
    assert parts._done() == 6
    parts.run()
    assert curve(parts) == curve(whole)
    assert len({look["dev_kl"] for look in curve(whole)}) == len(curve(whole)) > 4, "every stage changes something"
    values = parts.mapping.parameters()
    for name, value in whole.mapping.parameters().items():
        assert torch.equal(value, values[name]), name


def test_training_lowers_the_kl_and_is_not_repeated(
    fitted: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"steps": 24, "evaluate_every": 8, "learning_rate": 1e-2}
    config = replace(CONFIG, **settings)
    arguments = fitted.pair, fitted.forms, fitted.moments, fitted.calibration, config, tmp_path
    adapted = train_residual(*arguments)
    assert not list(tmp_path.rglob("readings"))
    (place,) = {path.parent for path in tmp_path.rglob("curve.json")}
    assert (place / "curve.png").stat().st_size > 1000
    looks = trainer(fitted, tmp_path, **settings).checkpoint.progress.curve
    assert [look["step"] for look in looks] == [0, 8, 16, 24]
    assert looks[-1]["loss"] < 0.9 * looks[1]["loss"]
    assert min(look["dev_kl"] for look in looks) < looks[0]["dev_kl"]
    monkeypatch.setattr(Trainer, "_step", None)
    again = train_residual(*arguments)
    assert adapted is not None
    assert again is not None
    assert [form.name for form in again] == [form.name for form in (*fitted.forms, adapted[-1])]
    assert torch.equal(again[-1].tensors()["expand"], adapted[-1].tensors()["expand"])


def test_no_branch_is_trained_where_none_is_wanted(fitted: Fitted, tmp_path: Path) -> None:
    config = ResidualConfig()
    assert train_residual(fitted.pair, fitted.forms, fitted.moments, fitted.calibration, config, tmp_path) is None
    assert not any(tmp_path.iterdir())


def test_a_training_that_diverges_stops_and_keeps_its_best(fitted: Fitted, tmp_path: Path) -> None:
    diverging = trainer(fitted, tmp_path, learning_rate=1e30, warmup=0, loss="mse")
    with pytest.raises(TrainingError, match=r"is (nan|inf) at step .* smaller mapper\.residual\.learning_rate"):
        diverging.run()
    kept = trainer(fitted, tmp_path, learning_rate=1e30, warmup=0, loss="mse").checkpoint
    assert kept.path.exists()
    assert not kept.best["expand"].any()


def test_training_stops_early(fitted: Fitted, tmp_path: Path) -> None:
    early = trainer(fitted, tmp_path, learning_rate=1e-30, evaluate_every=1, patience=2)
    early.run()
    assert [look["step"] for look in early.checkpoint.progress.curve] == [0, 1, 2]


def test_what_beats_nothing_is_not_added(fitted: Fitted, tmp_path: Path) -> None:
    config = replace(CONFIG, learning_rate=1e-30, steps=2, keep_readings=True)
    assert train_residual(fitted.pair, fitted.forms, fitted.moments, fitted.calibration, config, tmp_path) is None
    assert len(list((tmp_path / "readings").rglob("*.safetensors"))) == CONFIG.documents + CONFIG.dev_documents


def test_readings_that_do_not_fit_the_disk_are_refused(
    fitted: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    store = replace(fitted.store, folder=tmp_path)
    store.prepare(fitted.documents[:1])
    with pytest.raises(UsageError, match=r"take [\d.]+ kB, and .* has 1 kB free; give fewer mapper\.residual\."):
        replace(store, queries=10).prepare(fitted.documents)


def test_damaged_readings_are_refused(fitted: Fitted, tmp_path: Path) -> None:
    store = replace(fitted.store, folder=tmp_path)
    store.prepare(fitted.documents[:1])
    path = store.place(fitted.documents[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    with pytest.raises(CalibrationError, match=r"checksum\); delete it and the next run reads the document again\.$"):
        store.load([fitted.documents[0]])
    path.write_bytes(data[:100])
    with pytest.raises(CalibrationError, match=r"damaged .*; delete it and the next run reads the document again\.$"):
        store.load([fitted.documents[0]])


def test_a_damaged_checkpoint_says_that_the_training_starts_anew(fitted: Fitted, tmp_path: Path) -> None:
    path = trainer(fitted, tmp_path).checkpoint.path
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    with pytest.raises(CalibrationError, match=r"damaged .*; delete it and the training starts anew\.$"):
        trainer(fitted, tmp_path)


def test_a_training_says_where_it_starts_anew_beside_others(
    fitted: Fitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short: dict[str, Any] = {"steps": 1, "documents": 2, "dev_documents": 1, "keep_readings": True}
    first = trainer(fitted, tmp_path, **short)
    for each in (first, trainer(fitted, tmp_path, **short)):
        assert (finish(each) is not None) == each.checkpoint.progress.improved
    assert capsys.readouterr().out == ""
    other = trainer(fitted, tmp_path, **short, seed=1)
    finish(other)
    assert capsys.readouterr().out == (
        f"residual: {tmp_path} has trainings of other settings, maps or texts ({first.folder.name}); this one starts "
        f"anew, in {other.folder.name}\n"
    )


def test_kl_is_a_mean_over_documents(fitted: Fitted) -> None:
    mapping = fitted.adapted()
    with torch.no_grad():
        both = float(kl_loss(mapping, fitted.readings(), [24, 40], 8))
        apart = [float(kl_loss(mapping, fitted.store.load([row]), [24, 40], 8)) for row in fitted.documents]
    assert both == pytest.approx(sum(apart) / 2, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_divergence_of_many_rows_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    native, given = (3 * torch.randn(2, 21, 50, generator=generator) for _ in range(2))
    native[0, 0, 3] = -torch.inf
    leaves = [given.to(dtype).requires_grad_() for _ in range(2)]
    native = native.to(dtype)
    found = mean_divergence(native, leaves[0])
    logs = [logits.float().log_softmax(dim=-1).flatten(0, 1) for logits in (native, leaves[1])]
    expected = torch.nn.functional.kl_div(logs[1], logs[0].exp(), reduction="batchmean")
    torch.testing.assert_close(found, expected)
    (3 * found).backward()
    (3 * expected).backward()
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=close, atol=1e-6)
