"""Shared-basis forms: against explicit sums, in maps with other forms, in a bridge, and every part they must refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import Tensor

from kvbridge.bridge import Bridge
from kvbridge.cli.describe import print_bridge
from kvbridge.errors import ArtifactError, CacheError
from kvbridge.forms import Form, SharedBasis, SlotAffine, flops_per_token
from kvbridge.kernels import FormMap
from kvbridge.kernels.reference import rows_of, shared_basis
from kvbridge.layout import BridgeMap
from kvbridge.states import ContentStates
from kvbridge.variables import Span
from tiny_branch import BATCH, JOINT, NATIVE, REST, TOKENS, make_basis, make_states, pair, row, width
from tiny_bridge import forge_config, random_form, same_bridge
from tiny_models import relative_error


def expected_row(form: SharedBasis, x: Tensor) -> Tensor:
    z = x if form.reduce is None else x @ form.reduce.double()
    return z @ form.expand.double() + form.bias.double()


def test_rows_are_laid_out_by_span_layer_head_and_dimension() -> None:
    source, native = make_states("source"), make_states("target", 2, (1,))
    spans = (*JOINT, *NATIVE, Span("target.residual", 1, 2))
    rows = rows_of(spans, source, native)
    assert rows.shape == (BATCH, TOKENS, width(spans))
    for batch in range(BATCH):
        for token in range(TOKENS):
            parts = [row(source if span.role == "source" else native, span, batch, token) for span in spans]
            torch.testing.assert_close(rows[batch, token].double(), torch.cat(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [None, 1, 5], ids="rank-{}".format)
@pytest.mark.parametrize("inputs", [JOINT, JOINT + NATIVE], ids=["source", "native-too"])
def test_a_map_makes_what_the_equation_says(inputs: tuple[Span, ...], rank: int | None) -> None:
    form = make_basis(inputs, REST, rank)
    source, native = make_states("source"), make_states("target", 2, (1,))
    made = FormMap((form,)).apply(source, range(2, 4), native)
    assert made.keys.shape == made.values.shape == (2, BATCH, 4, TOKENS, 32)
    assert torch.equal(made.positions, source.positions)
    assert made.residual == {}
    for batch in range(BATCH):
        for token in range(TOKENS):
            x = torch.cat([row(source if s.role == "source" else native, s, batch, token) for s in inputs])
            local = [Span(span.variable, span.start - 2, span.stop - 2) for span in REST]
            found = torch.cat([row(made, span, batch, token) for span in local])
            assert relative_error(found, expected_row(form, x)) < 1e-5


def test_some_layers_and_the_residual_stream_where_they_end() -> None:
    outputs = (*REST, Span("target.residual", 3, 4))
    form, source = make_basis(JOINT, outputs), make_states("source")
    whole = shared_basis(form, rows_of(JOINT, source, None), range(2, 4))
    assert list(whole) == list(REST)
    part = FormMap((form,)).apply(source, range(2, 3))
    assert part.residual.keys() == {3}
    x = rows_of(JOINT, source, None)
    every = expected_row(form, x.double())
    assert relative_error(part.residual[3], every[..., -128:]) < 1e-5
    keys = every[..., :128].unflatten(-1, (4, 32)).transpose(1, 2)
    assert relative_error(part.keys[0], keys) < 1e-5


def test_forms_of_both_kinds_make_one_map() -> None:
    keys, values = random_form("keys", pair()), random_form("values", pair())
    early = make_basis(JOINT, (Span("target.values", 0, 3),))
    late = replace(make_basis(JOINT, (Span("target.values", 3, 4),)), reduce=early.reduce)
    source, layers = make_states("source"), range(1, 4)
    mixed = FormMap((keys, late, early)).apply(source, layers)
    assert torch.equal(mixed.keys, FormMap((keys, values)).apply(source, layers).keys)
    x = rows_of(JOINT, source, None)
    assert relative_error(mixed.values[2], expected_row(late, x.double()).unflatten(-1, (4, 32)).transpose(1, 2)) < 1e-5


def test_counts_products_of_what_is_made_and_a_shared_basis_once() -> None:
    p, per_layer = width(JOINT), 2 * 4 * 32
    low, full = make_basis(JOINT, (*REST, Span("target.residual", 3, 4)), 5), make_basis(JOINT, REST, None)
    assert low.flops_per_token(range(2, 4)) == 2 * (p * 5 + 5 * 2 * per_layer)
    assert low.flops_per_token(range(2, 3)) == 2 * (p * 5 + 5 * (per_layer + 128))
    assert low.flops_per_token(range(0, 2)) == 0
    assert full.flops_per_token(range(2, 4)) == 2 * p * 2 * per_layer
    first = make_basis(JOINT, (Span("target.keys", 0, 2),))
    second = replace(make_basis(JOINT, (Span("target.keys", 2, 4),)), reduce=first.reduce)
    other = make_basis(JOINT, (Span("target.values", 0, 4),))
    both = FormMap((first, second, other)).flops_per_token(range(4))
    assert both == 2 * (2 * p * 5 + 5 * 4 * per_layer)
    assert flops_per_token((first, second), range(2, 4)) == second.flops_per_token(range(2, 4))


def test_names_the_native_head_that_it_needs() -> None:
    assert FormMap((make_basis(JOINT, REST),)).needs_native_head() is None
    assert FormMap((make_basis(JOINT + NATIVE, REST),)).needs_native_head() == 1
    reads_deeper = make_basis((Span("target.normed_residual", 2, 3),), (Span("target.keys", 3, 4),))
    assert FormMap((make_basis(JOINT, REST[1:]), reads_deeper)).needs_native_head() == 2


@pytest.mark.parametrize(
    ("inputs", "native", "sentence"),
    [
        (JOINT + NATIVE, None, r"reads target\.keys\[0:2\] and the plan has no native head; give plan\.native_head=1"),
        (NATIVE, make_states("target", 1), r"reads target\.keys\[0:2\] and the plan's native head makes layers 0 … 0"),
        (NATIVE[2:], make_states("target", 1), r"reads target\.normed_residual\[1:2\] and .*give plan\.native_head=1"),
        ((Span("source.keys", 0, 9),), None, r"reads source\.keys\[0:9\]; the source states have 3 layers"),
    ],
    ids=["no-head", "short-head", "no-residual", "other-source"],
)
def test_refuses_states_that_lack_what_it_reads(
    inputs: tuple[Span, ...], native: ContentStates | None, sentence: str
) -> None:
    with pytest.raises(CacheError, match=sentence):
        FormMap((make_basis(inputs, REST),)).apply(make_states("source"), range(2, 4), native)


def test_refuses_a_plan_that_maps_layers_which_it_does_not_make() -> None:
    with pytest.raises(CacheError, match=r"makes no keys of target layers 1, which the plan maps"):
        FormMap((make_basis(JOINT, REST),)).apply(make_states("source"), range(1, 4))
    with pytest.raises(CacheError, match=r"two forms of one map make target\.values of layer 2; give one form"):
        FormMap((make_basis(JOINT, REST), make_basis(JOINT, REST[1:])))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"expand": torch.zeros(4, 512)}, r"reduces to 5 directions and expands 4; both must agree"),
        ({"bias": torch.zeros(511)}, r"expands to 512 numbers and has a bias of 511"),
        ({"outputs": REST[:1]}, r"expands to 512 numbers, which are not the rows of target\.keys\[2:4\]"),
        ({"kv_heads": 3}, r"not the rows of .* with 3 KV heads × 32"),
        (
            {"outputs": (Span("source.keys", 0, 4),)},
            r"makes source\.keys\[0:4\]; expected target\.keys",
        ),
        ({"outputs": (*REST, Span("target.residual", 3, 4))}, r"which are not the rows of .*target\.residual\[3:4\]"),
        ({"inputs": ()}, r"names no inputs or no outputs"),
        ({"expand": torch.zeros(5, 512, dtype=torch.int8)}, r"floating-point parts .* expand torch\.int8\[5, 512\]"),
        ({"reduce": torch.zeros(5)}, r"floating-point parts with these axes: reduce of 2.*; given: reduce .*\[5\]"),
    ],
    ids=["rank", "bias", "outputs", "heads", "source", "residual", "no-inputs", "whole", "flat"],
)
def test_refuses_parts_that_do_not_fit(changes: dict, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = make_basis(JOINT, REST)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(CacheError, match=sentence):
        replace(form, **changes)


# In a bridge


def bridge_of(*forms: Form) -> Bridge:
    evidence = {"r2": {"keys": [[], [], [0.5] * 4, [0.25] * 4]}, "rows_per_feature": 12.0}
    return Bridge({"low": BridgeMap(forms, {"name": "joint"}, evidence)}, pair().identity(), pair().describe())


def test_a_bridge_keeps_a_shared_basis_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_basis(JOINT + NATIVE, REST[:1])
    second = replace(make_basis(JOINT + NATIVE, REST[1:]), reduce=first.reduce)
    full = make_basis(JOINT, (Span("target.residual", 3, 4),), None)
    bridge = bridge_of(first, second, full)
    bridge.save_pretrained(tmp_path / "bridge", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "bridge" / "config.json").read_text())
    assert [form.get("reduce") for form in config["maps"]["low"]["forms"]] == [0, 0, None]
    assert config["tensors"].keys() == {f"low/{n}.{t}" for n in range(3) for t in ("expand", "bias")} | {"low/0.reduce"}
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair())
    one, two, three = loaded.map("low").forms
    assert isinstance(one, SharedBasis)
    assert isinstance(two, SharedBasis)
    assert one.reduce is two.reduce
    assert isinstance(three, SharedBasis)
    assert three.reduce is None
    assert (one.inputs, one.outputs, three.outputs) == (first.inputs, first.outputs, full.outputs)
    print_bridge(loaded, "here")
    shown = " ".join(capsys.readouterr().out.split())
    for said in (
        f"shared_basis (rank {one.expand.shape[0]}) → {REST[0]},",
        "shared_basis (full rank) → target.residual",
    ):
        assert said in shown
    assert loaded.parameters() == bridge.parameters()
    loaded.save_pretrained(tmp_path / "again")
    assert same_bridge(Bridge.from_pretrained(tmp_path / "again"), loaded) is False
    halved = {"low": bridge.map().to(dtype=torch.bfloat16)}
    assert same_bridge(loaded, replace(bridge, maps=halved))


LIES = {
    "other-inputs": (lambda form: form.update(inputs=["source.keys[0:3]"]), r"its own geometry says 96 and 512"),
    "beyond": (
        lambda form: form.update(inputs=["source.keys[0:3]", "source.values[1:4]"]),
        r"has no source",
    ),
    "no-span": (lambda form: form.update(outputs=["target.keys"]), r"is no span of layers"),
    "no-rank": (lambda form: form.pop("reduce"), r"form 0 of map low has a basis, and config\.json says otherwise"),
    "of-nothing": (lambda form: form.update(reduce=3), r"shares the basis of form 3, which has none"),
    "heads": (lambda form: form.update(kv_heads=2, head_dim=64), r"in 2 KV heads × 64; its own geometry .* 4 × 32"),
    "lacking": (lambda form: form.pop("kv_heads"), r"form 0 of map low lacks 'kv_heads'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_bridge_refuses_a_form_that_its_config_does_not_describe(lie: str, tmp_path: Path) -> None:
    bridge_of(make_basis(JOINT, REST)).save_pretrained(tmp_path / "bridge")
    change, sentence = LIES[lie]
    forge_config(tmp_path / "bridge", lambda config: change(config["maps"]["low"]["forms"][0]))
    with pytest.raises(ArtifactError, match=sentence) as caught:
        Bridge.from_pretrained(tmp_path / "bridge")
    assert "\n" not in str(caught.value)


def test_a_map_that_makes_a_layer_twice_is_refused_on_load(tmp_path: Path) -> None:
    keys: SlotAffine = random_form("keys", pair())
    bridge_of(keys, random_form("values", pair())).save_pretrained(tmp_path / "bridge")
    forge_config(tmp_path / "bridge", lambda config: config["maps"]["low"]["forms"][1].update(kind="keys"))
    with pytest.raises(ArtifactError, match=r"map low is inconsistent: two forms .* target\.keys of layer 0"):
        Bridge.from_pretrained(tmp_path / "bridge")
