"""Fitting methods: what every mapper must do, then ridge against scikit-learn and brute force.

A new mapper is tested by one line in `MAPPERS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

from kvbridge import compat
from kvbridge.assembly import hand_off
from kvbridge.bridge import Bridge
from kvbridge.calibration import ATTENTION, CalibrationConfig, CalibrationMoments, Moments, calibrate, open_corpus
from kvbridge.calibration.draw import Draw
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.folding import fold_if_not_dearer
from kvbridge.forms import KINDS, ResidualBranch, SlotAffine, flops_per_token, input_slot
from kvbridge.geometry import KVGeometry
from kvbridge.kernels import FormMap
from kvbridge.layout import BridgeMap
from kvbridge.mappers import FittedMap, Identity, Joint, Mapper, Random, ReducedRank, Ridge, available
from kvbridge.mappers.base import CostedMapper, Unfitted
from kvbridge.mappers.regression import explained_squares, held_out_r2, ridge_solve
from kvbridge.mappers.residual.mapping import branch_inputs
from kvbridge.mappers.residual_config import KINDS_OF_BRANCH, ResidualConfig
from kvbridge.mappers.ridge import rank_layers
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from kvbridge.variables import Span
from tiny_pair import tiny_pair, write_corpus

MAPPERS: list[Mapper] = [
    Identity(),
    Ridge(k=2),
    Ridge(k=8, penalty=1e-3, scale="correlation", first_positions="included"),
    Ridge(k=1, heads="matched"),
    Random(),
    Joint(),
    Joint(native_head=1, other_kind=[1.0, 10.0], native=[0.1, 1.0], distance=[0.0, 0.5]),
    Joint(native_head=None, boundary=2),
    ReducedRank(rank=12),
    ReducedRank(rank=4, groups=2, metric="coordinate", joint=Joint(native_head=1)),
    ReducedRank(rank=12, metric="attention", key_weight=2.0, joint=Joint(native_head=None, boundary=2)),
]
# Mappers that only fit a pair of equal shapes.
EQUAL_SHAPES = (Identity,)
BLOCK, FIRST = 32, 4


@dataclass(frozen=True)
class Calibrated:
    """A pair, moments of all products that some mapper asks for, and the states of the held-out rows themselves."""

    pair: ModelPair
    moments: CalibrationMoments
    source: ContentStates
    target: ContentStates

    def apply(self, fitted: FittedMap, layers: range) -> ContentStates:
        """What a map makes of the held-out rows, with all that a native head could give it."""
        return FormMap(fitted.forms).apply(self.source, layers, self.target)

    def moments_for(self, mapper: Mapper) -> CalibrationMoments:
        """The moments that a calibration for `mapper` alone would have."""
        sets = {
            at: Moments(
                kept.rows,
                kept.mean,
                kept.square,
                {(a, b): kept.cross_products([a], [b]) for a, b in mapper.blocks() - {ATTENTION}},
                kept.layers,
            )
            for at, kept in self.moments.sets.items()
        }
        attention = self.moments.attention if ATTENTION in mapper.blocks() else None
        return CalibrationMoments(sets, self.moments.info, attention=attention)

    def fit(self, mapper: Mapper) -> FittedMap:
        return mapper.fit(self.moments_for(mapper), self.pair.source.geometry, self.pair.target.geometry)


def made_layers(fitted: FittedMap) -> range:
    """The target layers whose keys and values a map makes."""
    spans = [span for form in fitted.forms for span in form.outputs if span.states in KINDS]
    return range(min(span.start for span in spans), max(span.stop for span in spans))


def slot_forms(fitted: FittedMap) -> dict[str, SlotAffine]:
    """The forms of a map that makes keys with one form and values with another."""
    return {form.kind: form for form in fitted.forms if isinstance(form, SlotAffine)}


def calibrate_pair(pair: ModelPair, folder: Path) -> Calibrated:
    corpus = str(write_corpus(folder / "corpus.jsonl", documents=44, words=14))
    sizes: dict[str, Any] = {"tokens": 40 * BLOCK, "block": BLOCK, "held_out": 0.1}
    blocks = frozenset[tuple[str, str]]().union(*(mapper.blocks() for mapper in MAPPERS))
    moments = calibrate(pair, CalibrationConfig(corpus, precision="float64", **sizes), blocks, folder)
    assert moments is not None
    drawn = Draw(seed=0, **sizes).blocks(open_corpus(corpus), pair.tokenizer)
    tokens = drawn.batch([at for at in range(len(drawn)) if drawn.split[at] == 1])
    with compat.residual_streams(pair.target.model, range(pair.target.geometry.layers)) as streams:
        source, target = (model.content(model.read(tokens)) for model in (pair.source, pair.target))
    target = dataclasses.replace(target, residual={layer: stream.float() for layer, stream in streams.items()})
    return Calibrated(pair, moments, source.span(FIRST, BLOCK), target.span(FIRST, BLOCK))


@pytest.fixture(scope="module")
def unequal(own_dataset_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """3 → 4 layers, 2 → 4 KV heads, 16 → 32 wide."""
    return calibrate_pair(tiny_pair(), tmp_path_factory.mktemp("unequal"))


@pytest.fixture(scope="module")
def equal(unequal: Calibrated, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """The same model twice."""
    source = unequal.pair.source
    return calibrate_pair(dataclasses.replace(unequal.pair, target=source), tmp_path_factory.mktemp("equal"))


@pytest.fixture(params=MAPPERS, ids=str)
def mapper(request: pytest.FixtureRequest) -> Mapper:
    return request.param


@pytest.fixture
def calibrated(mapper: Mapper, unequal: Calibrated, equal: Calibrated) -> Calibrated:
    return equal if isinstance(mapper, EQUAL_SHAPES) else unequal


def test_every_exported_mapper_is_in_the_matrix() -> None:
    assert {type(mapper) for mapper in MAPPERS} == set(available().values())


def test_says_before_the_fit_what_its_map_will_cost(mapper: Mapper, calibrated: Calibrated) -> None:
    if not isinstance(mapper, CostedMapper):
        return
    source, target = calibrated.pair.source.geometry, calibrated.pair.target.geometry
    fitted = calibrated.fit(mapper)
    layers = made_layers(fitted)
    expected, found = mapper.map_flops(source, target, layers), flops_per_token(fitted.forms, layers)
    # Held-out moments may choose a smaller rank.
    assert found <= expected if isinstance(mapper, ReducedRank) else found == expected


def test_says_before_the_fit_what_a_branch_on_its_map_will_cost(mapper: Mapper, calibrated: Calibrated) -> None:
    if not isinstance(mapper, CostedMapper):
        return
    sides = {"source": calibrated.pair.source.geometry, "target": calibrated.pair.target.geometry}
    fitted = calibrated.fit(mapper)
    layers, inputs = made_layers(fitted), branch_inputs(fitted.forms, sides["source"])
    outputs = tuple(Span(f"target.{kind}", layers.start, layers.stop) for kind in KINDS)
    read, made = (sum(span.width(sides[span.role]) for span in spans) for spans in (inputs, outputs))
    frozen, planned = flops_per_token(fitted.forms, layers), mapper.map_flops(*sides.values(), layers)
    for kind, rank in itertools.product(KINDS_OF_BRANCH, (3, 400)):
        wide = 2 * rank if kind == "quadratic" else rank
        weights = (torch.ones(read, wide), torch.ones(wide), torch.ones(rank, made), torch.ones(made))
        branch = ResidualBranch(inputs, outputs, kind, *weights, sides["target"].kv_heads, sides["target"].head_dim)
        found = flops_per_token(fold_if_not_dearer((*fitted.forms, branch), *sides.values()), layers)
        expected = Unfitted(mapper, *sides.values(), ResidualConfig(kind, rank)).flops_per_token(layers)
        if not isinstance(mapper, ReducedRank):
            assert found == expected, (kind, rank)
        elif kind != "linear":
            # Held-out moments may choose a smaller rank of the map.
            assert found - frozen == expected - planned, (kind, rank)


def test_is_a_frozen_dataclass_that_is_registered(mapper: Mapper) -> None:
    assert isinstance(mapper, Mapper)
    assert available()[mapper.name] is type(mapper)
    assert type(mapper).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    assert mapper == dataclasses.replace(mapper)  # pyright: ignore[reportArgumentType]


def overrides(name: str, value: Any) -> list[str]:
    """Overrides that give every hyper-parameter below `name`."""
    if isinstance(value, dict):
        return [override for key, inner in value.items() for override in overrides(f"{name}.{key}", inner)]
    return [f"{name}={'null' if value is None else value}"]


@pytest.mark.filterwarnings("ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")
def test_is_a_configuration(mapper: Mapper) -> None:
    # beartype warns of how omegaconf annotates DictConfig.
    from kvbridge.cli.mapper_schema import separated
    from kvbridge.cli.settings import register

    register()
    changed = overrides("mapper", dataclasses.asdict(mapper))  # pyright: ignore[reportArgumentType]
    with initialize_config_module("kvbridge.configs", version_base="1.3"):
        composed = compose("config", overrides=[f"mapper={mapper.name}", *changed])
    assert separated(OmegaConf.to_object(composed.mapper))[0] == mapper


def test_forms_have_the_targets_shape(mapper: Mapper, calibrated: Calibrated) -> None:
    source, target = calibrated.pair.source.geometry, calibrated.pair.target.geometry
    fitted = calibrated.fit(mapper)
    slots = len(KINDS) * source.layers * source.kv_heads
    for kind, form in slot_forms(fitted).items():
        assert form.slots.shape[:2] == (target.layers, target.kv_heads)
        assert form.weight.shape == (*form.slots.shape, source.head_dim, target.head_dim)
        assert form.bias.shape == (target.layers, target.kv_heads, target.head_dim)
        assert (form.slots.dtype, form.weight.dtype, form.bias.dtype) == (torch.int32, torch.float32, torch.float32)
        assert 0 <= int(form.slots.min()) <= int(form.slots.max()) < slots
        read = {(int(slot) // source.kv_heads) % source.layers for slot in form.slots[-1].flatten()}
        assert read == set(fitted.selected_layers[kind][-1])
    json.dumps(fitted.evidence(), allow_nan=False)


def test_maps_live_states_of_some_layers(mapper: Mapper, calibrated: Calibrated) -> None:
    fitted, target = calibrated.fit(mapper), calibrated.pair.target.geometry
    states, layers = calibrated.source, made_layers(fitted)[1:]
    mapped = calibrated.apply(fitted, layers)
    shape = (len(layers), states.keys.shape[1], target.kv_heads, states.tokens, target.head_dim)
    assert mapped.keys.shape == mapped.values.shape == shape
    assert torch.isfinite(mapped.keys).all()
    assert torch.isfinite(mapped.values).all()
    assert torch.equal(mapped.positions, states.positions)


def test_its_evidence_is_what_its_forms_do_on_held_out_rows(mapper: Mapper, calibrated: Calibrated) -> None:
    fitted, target = calibrated.fit(mapper), calibrated.pair.target.geometry
    layers = made_layers(fitted)
    mapped = calibrated.apply(fitted, layers)
    for kind, grid in fitted.r2.items():
        assert [bool(row) for row in grid] == [layer in layers for layer in range(target.layers)]
        found, wanted = (
            getattr(states, kind).permute(0, 2, 1, 3, 4).flatten(2, 3).double().numpy()
            for states in (mapped, calibrated.target)
        )
        for at, layer in enumerate(layers):
            expected = [
                r2_score(wanted[layer, head], found[at, head], multioutput="variance_weighted")
                for head in range(target.kv_heads)
            ]
            assert grid[layer] == pytest.approx(expected, abs=1e-4)


def test_fitting_is_deterministic_and_leaves_the_moments_alone(mapper: Mapper, calibrated: Calibrated) -> None:
    before = {at: moments.clone().tensors() for at, moments in calibrated.moments.sets.items()}
    first, again = calibrated.fit(mapper), calibrated.fit(mapper)
    for form, other in zip(first.forms, again.forms, strict=True):
        assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in form.tensors().items())
    assert first.evidence() == again.evidence()
    for at, tensors in before.items():
        assert all(torch.equal(tensors[name], now) for name, now in calibrated.moments.sets[at].tensors().items())


def test_a_saved_bridge_maps_alike(mapper: Mapper, calibrated: Calibrated, tmp_path: Path) -> None:
    fitted, pair = calibrated.fit(mapper), calibrated.pair
    description = {"name": mapper.name} | dataclasses.asdict(mapper)  # pyright: ignore[reportArgumentType]
    fit = BridgeMap(fitted.forms, description, fitted.evidence())
    bridge = Bridge({mapper.name: fit}, pair.identity(), pair.describe())
    bridge.save_pretrained(tmp_path / "bridge")
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair)
    assert loaded.fingerprint() == bridge.fingerprint()
    assert loaded.map().evidence == json.loads(json.dumps(fitted.evidence()))
    layers = made_layers(fitted)
    mapped = [FormMap.of(at).apply(calibrated.source, layers, calibrated.target) for at in (bridge, loaded)]
    assert torch.equal(mapped[0].keys, mapped[1].keys)
    assert torch.equal(mapped[0].values, mapped[1].values)


def test_its_map_hands_off(mapper: Mapper, calibrated: Calibrated) -> None:
    pair, fitted = calibrated.pair, calibrated.fit(mapper)
    prompt = pair.tokenizer("amber basil cedar delta ember fjord", return_tensors="pt")["input_ids"]
    states = pair.source.content(pair.source.read(prompt))
    layers = made_layers(fitted)
    plan = HandoffPlan(
        sinks=4,
        native_head=max(0, layers.start - 1),
        native_tail=4,
        tail_recompute=pair.target.geometry.layers - layers.stop,
    )
    handoff = hand_off(pair.target, plan, FormMap(fitted.forms), states, prompt)
    assert torch.isfinite(handoff.logits).all()
    assert handoff.cache.get_seq_length() == prompt.shape[1]


def test_identity_between_equal_models_is_native(equal: Calibrated) -> None:
    fitted, model = equal.fit(Identity()), equal.pair.target
    prompt = equal.pair.tokenizer("amber basil cedar delta ember fjord", return_tensors="pt")["input_ids"]
    cache, native = model.prefill(prompt)
    states = model.content(cache)
    mapping = FormMap(fitted.forms)
    handoff = hand_off(model, HandoffPlan(0, None, 1), mapping, states, prompt)
    torch.testing.assert_close(handoff.logits, native[:, -1], rtol=0, atol=1e-4)
    mapped = mapping.apply(states, range(model.geometry.layers))
    assert torch.equal(mapped.keys, states.keys)
    assert torch.equal(mapped.values, states.values)


def test_identity_refuses_unequal_shapes(unequal: Calibrated) -> None:
    sentence = (
        r"^mapper=identity needs equal shapes; the source is llama: 3 layers, 2 KV heads × 16, .*, "
        r"the target qwen3: 4 layers, 4 KV heads × 32"
    )
    with pytest.raises(UsageError, match=sentence):
        unequal.fit(Identity())


def test_the_penalties_that_were_chosen_are_evidence(unequal: Calibrated) -> None:
    found = unequal.fit(Joint(native_head=1, penalties=[1e3, 1e-3])).evidence()["penalties"]
    assert set(found) == {f"target.{kind}[{layer}:{layer + 1}]" for kind in KINDS for layer in (2, 3)}
    assert all(each == {"own": 1e-3, "other": 1e-3, "native": 1e-3, "distance": 0.0} for each in found.values())
    assert unequal.fit(Ridge(k=2)).evidence()["penalties"] == {}


# Ridge on synthetic rows, whose every number is known.


def geometry(layers: int, heads: int, width: int) -> KVGeometry:
    return KVGeometry("llama", layers, heads, width, heads, heads * width, 512, {}, "default", "none")


SMALL, LARGE = geometry(3, 2, 4), geometry(2, 3, 5)
Rows = dict[str, np.ndarray]


def make_rows(count: int, source: KVGeometry = SMALL, target: KVGeometry = LARGE, seed: int = 0) -> Rows:
    """Source rows of uneven scales and means, and noisy linear functions of them."""
    chance = np.random.default_rng(seed)
    weights = np.random.default_rng(99)
    rows: Rows = {}
    for kind in KINDS:
        inputs = chance.standard_normal((count, source.width)) * np.geomspace(0.1, 10, source.width)
        mixed = inputs @ weights.standard_normal((source.width, target.width)) / source.width**0.5
        rows[f"source.{kind}"] = inputs + np.linspace(-3, 3, source.width)
        rows[f"target.{kind}"] = mixed + 2 * chance.standard_normal((count, target.width)) + 7
    return rows


def moments_of(parts: dict[tuple[str, str], Rows], blocks: frozenset[tuple[str, str]]) -> CalibrationMoments:
    sets = {}
    for split in ("fit", "held_out"):
        for part in ("first", "rest"):
            rows = parts.get((split, part), {name: value[:0] for name, value in parts["fit", "rest"].items()})
            sets[split, part] = Moments.zeros({name: value.shape[1] for name, value in rows.items()}, blocks)
            sets[split, part].add({name: torch.from_numpy(value) for name, value in rows.items()})
    return CalibrationMoments(sets)


def columns(layers: list[int], heads: list[int], of: KVGeometry) -> list[int]:
    """Columns of `[L·H·D]` rows that hold some heads of some layers."""
    starts = [(layer * of.kv_heads + head) * of.head_dim for layer in layers for head in heads]
    return [start + at for start in starts for at in range(of.head_dim)]


def dense(form: SlotAffine, layer: int, head: int) -> np.ndarray:
    """Weights of one target head `[S·D_s, D_t]`."""
    return form.weight[layer, head].flatten(0, 1).double().numpy()


def sklearn_ridge(inputs: np.ndarray, outputs: np.ndarray, penalty: float, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Weights and bias on raw inputs.

    `spread² = n · std²` on the diagonal of the Gram: unit-variance columns have a Gram n times the equilibrated one, so
    the correlation scale's λ is scikit-learn's alpha over n.
    """
    if scale == "absolute":
        fitted = SklearnRidge(alpha=penalty, solver="cholesky").fit(inputs, outputs)
        return fitted.coef_.T, fitted.intercept_
    scaler = StandardScaler().fit(inputs)
    fitted = SklearnRidge(alpha=penalty * len(inputs), solver="cholesky").fit(scaler.transform(inputs), outputs)
    weight = fitted.coef_.T / scaler.scale_[:, None]
    return weight, fitted.intercept_ - scaler.mean_ @ weight


@pytest.mark.parametrize("penalty", [1e-6, 0.01, 30.0])
@pytest.mark.parametrize("scale", ["absolute", "correlation"])
def test_the_solver_is_scikit_learns(scale: str, penalty: float) -> None:
    rows = make_rows(200)
    inputs, outputs = rows["source.keys"], rows["target.keys"]
    centred = inputs - inputs.mean(axis=0)
    gram, cross = torch.from_numpy(centred.T @ centred), torch.from_numpy(centred.T @ (outputs - outputs.mean(axis=0)))
    before = gram.clone()
    weight = ridge_solve(gram, cross, penalty, scale)
    expected, _ = sklearn_ridge(inputs, outputs, penalty, scale)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=0, atol=1e-8)
    assert torch.equal(gram, before)


def test_lambda_on_the_correlation_scale_is_the_same_for_every_unit_and_row_count() -> None:
    rows = make_rows(200)
    inputs, outputs = (torch.from_numpy(rows[at] - rows[at].mean(axis=0)) for at in ("source.keys", "target.keys"))
    weight = ridge_solve(inputs.T @ inputs, inputs.T @ outputs, 0.1, "correlation")
    units = torch.logspace(-3, 3, inputs.shape[1], dtype=torch.float64)
    scaled = torch.cat((inputs, inputs)) * units
    again = ridge_solve(scaled.T @ scaled, scaled.T @ torch.cat((outputs, outputs)), 0.1, "correlation")
    torch.testing.assert_close(again * units[:, None], weight, rtol=1e-9, atol=1e-12)


def test_a_constant_input_gets_no_weight_on_the_correlation_scale() -> None:
    gram, cross = torch.diag(torch.tensor([2.0, 0.0]).double()), torch.tensor([[1.0], [0.0]]).double()
    assert ridge_solve(gram, cross, 1.0, "correlation").flatten().tolist() == pytest.approx([0.25, 0.0])


@pytest.mark.parametrize("scale", ["absolute", "correlation"])
def test_refuses_singular_normal_equations(scale: str) -> None:
    gram = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(CalibrationError, match=rf"equations of 2 features are singular at λ=0 \({scale}\); give more"):
        ridge_solve(gram, torch.ones(2, 1, dtype=torch.float64), 0.0, scale)


@pytest.mark.parametrize("first_positions", ["excluded", "included"])
@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("scale", "penalty"), [("absolute", 5.0), ("correlation", 0.02)])
def test_fitted_forms_are_scikit_learns(scale: str, penalty: float, heads: str, first_positions: str) -> None:
    mapper = Ridge(2, penalty, scale, heads, first_positions)
    parts = {("fit", "rest"): make_rows(150), ("fit", "first"): make_rows(30, seed=1)}
    fitted = mapper.fit(moments_of(parts, mapper.blocks()), SMALL, LARGE)
    used = parts["fit", "rest"]
    if first_positions == "included":
        used = {name: np.concatenate((parts["fit", "first"][name], rows)) for name, rows in used.items()}
    for kind, form in slot_forms(fitted).items():
        for layer, layers in enumerate(fitted.selected_layers[kind]):
            for head in range(LARGE.kv_heads):
                read = [0, 1] if heads == "all" else [[0, 0, 1][head]]
                inputs = used[f"source.{kind}"][:, columns(layers, read, SMALL)]
                outputs = used[f"target.{kind}"][:, columns([layer], [head], LARGE)]
                weight, bias = sklearn_ridge(inputs, outputs, penalty, scale)
                np.testing.assert_allclose(dense(form, layer, head), weight, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(form.bias[layer, head], bias, rtol=1e-5, atol=1e-5)
    assert fitted.rows_per_feature == (180 if first_positions == "included" else 150) / (16 if heads == "all" else 8)


@pytest.mark.parametrize(
    ("source_heads", "reads"), [(2, [0, 0, 1, 1]), (4, [0, 2]), (3, [0, 1, 2])], ids=["2-to-4", "4-to-2", "3-to-3"]
)
def test_matched_heads_read_the_head_of_their_place_only(source_heads: int, reads: list[int]) -> None:
    source, target = geometry(3, source_heads, 4), geometry(2, len(reads), 4)
    mapper = Ridge(k=2, heads="matched")
    fitted = mapper.fit(moments_of({("fit", "rest"): make_rows(100, source, target)}, mapper.blocks()), source, target)
    for kind, form in slot_forms(fitted).items():
        for layer, layers in enumerate(fitted.selected_layers[kind]):
            expected = [[input_slot(kind, at, head, 3, source_heads) for at in layers] for head in reads]
            assert form.slots[layer].tolist() == expected


def test_keys_are_read_from_keys_and_values_from_values() -> None:
    mapper = Ridge(k=3)
    fitted = mapper.fit(moments_of({("fit", "rest"): make_rows(100)}, mapper.blocks()), SMALL, LARGE)
    half = SMALL.layers * SMALL.kv_heads
    assert slot_forms(fitted)["keys"].slots[0, 0].tolist() == list(range(half))
    assert slot_forms(fitted)["values"].slots[0, 0].tolist() == list(range(half, 2 * half))


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_held_out_r2_is_scikit_learns(heads: str) -> None:
    mapper = Ridge(k=2, heads=heads)
    held_out = make_rows(80, seed=5)
    # A shift of the means between the splits is an error of the map and must show.
    held_out["target.values"] += 0.5
    fitted = mapper.fit(
        moments_of({("fit", "rest"): make_rows(100), ("held_out", "rest"): held_out}, mapper.blocks()), SMALL, LARGE
    )
    for kind, form in slot_forms(fitted).items():
        for layer, layers in enumerate(fitted.selected_layers[kind]):
            for head in range(LARGE.kv_heads):
                read = [0, 1] if heads == "all" else [[0, 0, 1][head]]
                inputs = held_out[f"source.{kind}"][:, columns(layers, read, SMALL)]
                made = inputs @ dense(form, layer, head) + form.bias[layer, head].double().numpy()
                wanted = held_out[f"target.{kind}"][:, columns([layer], [head], LARGE)]
                expected = r2_score(wanted, made, multioutput="variance_weighted")
                assert fitted.r2[kind][layer][head] == pytest.approx(expected, abs=1e-9)


def test_without_a_held_out_split_there_is_no_r2() -> None:
    mapper = Ridge(k=1)
    fitted = mapper.fit(moments_of({("fit", "rest"): make_rows(100)}, mapper.blocks()), SMALL, LARGE)
    assert fitted.r2 == {}


def test_a_useless_map_has_a_negative_r2() -> None:
    rows = make_rows(60)
    moments = moments_of({("fit", "rest"): rows}, Ridge().blocks()).sets["fit", "rest"]
    slots = torch.zeros(LARGE.layers, LARGE.kv_heads, 1, dtype=torch.int32)
    zero = SlotAffine("keys", slots, torch.zeros(*slots.shape, 4, 5), torch.zeros(LARGE.layers, LARGE.kv_heads, 5))
    found = held_out_r2(zero, moments, SMALL)
    wanted = rows["target.keys"][:, columns([1], [2], LARGE)]
    assert found[1][2] == pytest.approx(r2_score(wanted, np.zeros_like(wanted), multioutput="variance_weighted"))
    assert found[1][2] < -1


def brute_force_ranking(rows: Rows) -> np.ndarray:
    """R² of ordinary least squares on one source layer, averaged over heads and over keys and values."""
    ranking = np.zeros((LARGE.layers, SMALL.layers))
    for kind in KINDS:
        centred = {role: rows[f"{role}.{kind}"] - rows[f"{role}.{kind}"].mean(axis=0) for role in ("source", "target")}
        for at in range(SMALL.layers):
            inputs = centred["source"][:, columns([at], [0, 1], SMALL)]
            for layer in range(LARGE.layers):
                for head in range(LARGE.kv_heads):
                    outputs = centred["target"][:, columns([layer], [head], LARGE)]
                    residual = outputs - inputs @ np.linalg.lstsq(inputs, outputs)[0]
                    share = 1 - (residual**2).sum() / (outputs**2).sum()
                    ranking[layer, at] += share / LARGE.kv_heads / len(KINDS)
    return ranking


def full_rank(rows: Rows) -> None:
    """As made."""


def twin_heads(rows: Rows) -> None:
    for kind in KINDS:
        rows[f"source.{kind}"][:, columns([1], [1], SMALL)] = rows[f"source.{kind}"][:, columns([1], [0], SMALL)]


def constant_head(rows: Rows) -> None:
    rows["source.keys"][:, columns([2], [0], SMALL)] = 3.0


def dead_layer(rows: Rows) -> None:
    for kind in KINDS:
        rows[f"source.{kind}"][:, columns([0], [0, 1], SMALL)] = 0.0


def outlier_channel(rows: Rows) -> None:
    rows["source.keys"][:, 0] *= 1e7


@pytest.mark.parametrize(
    "spoil",
    [full_rank, twin_heads, constant_head, dead_layer, outlier_channel],
    ids=lambda spoil: spoil.__name__.replace("_", "-"),
)
def test_layers_are_ranked_as_by_brute_force(spoil: Callable[[Rows], None]) -> None:
    rows = make_rows(120)
    spoil(rows)
    moments = moments_of({("fit", "rest"): rows}, Ridge().blocks()).sets["fit", "rest"]
    np.testing.assert_allclose(rank_layers(moments, SMALL, LARGE).numpy(), brute_force_ranking(rows), rtol=0, atol=1e-8)


def test_the_most_predictive_layers_are_chosen() -> None:
    """Target layer 0 is made of source layers 0 and 2, target layer 1 of source layer 1."""
    rows = make_rows(150)
    chance = np.random.default_rng(3)
    for kind in KINDS:
        for layer, made_of in enumerate(([0, 2], [1])):
            inputs = rows[f"source.{kind}"][:, columns(made_of, [0, 1], SMALL)]
            whitened = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
            outputs = whitened @ chance.standard_normal((whitened.shape[1], LARGE.kv_heads * LARGE.head_dim))
            rows[f"target.{kind}"][:, columns([layer], [0, 1, 2], LARGE)] = outputs
    moments = moments_of({("fit", "rest"): rows}, Ridge().blocks())
    two, one = (Ridge(k=k).fit(moments, SMALL, LARGE).selected_layers["keys"] for k in (2, 1))
    assert two[0] == [0, 2]
    assert one[1] == [1]
    assert Ridge(k=8).fit(moments, SMALL, LARGE).selected_layers["values"] == [[0, 1, 2]] * 2


def test_explained_squares_of_no_input_are_none() -> None:
    empty = torch.zeros(3, 3, dtype=torch.float64)
    assert explained_squares(empty, torch.zeros(3, 2, dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_refuses_too_few_rows_with_the_counts() -> None:
    moments = moments_of({("fit", "rest"): make_rows(16)}, Ridge().blocks())
    sentence = r"^16 calibration rows for 16 features per map: .* Raise calibration\.tokens or lower mapper\.k\.$"
    with pytest.raises(CalibrationError, match=sentence):
        Ridge(k=2).fit(moments, SMALL, LARGE)
    assert Ridge(k=1, heads="matched").fit(moments, SMALL, LARGE).rows_per_feature == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scale": "relative"}, r"^mapper\.scale=relative: expected one of absolute, correlation\.$"),
        ({"heads": "some"}, r"^mapper\.heads=some: expected one of all, matched\.$"),
        ({"first_positions": "mapped"}, r"^mapper\.first_positions=mapped: expected one of excluded, included\.$"),
        ({"k": 0}, r"^mapper\.k=0, mapper\.penalty=0\.01: expected k ≥ 1 and λ ≥ 0\.$"),
        ({"penalty": -1.0}, r"^mapper\.k=8, mapper\.penalty=-1: expected k ≥ 1 and λ ≥ 0\.$"),
    ],
    ids=["scale", "heads", "first_positions", "k", "penalty"],
)
def test_refuses_impossible_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Ridge(**options)
