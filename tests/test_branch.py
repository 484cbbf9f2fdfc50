"""Residual branches: against explicit sums, on maps of every form and under every plan, folded, stored and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbridge.assembly import hand_off
from kvbridge.branch import ACTIVATIONS, join_branches
from kvbridge.bridge import Bridge
from kvbridge.cli.describe import print_bridge
from kvbridge.errors import ArtifactError, CacheError
from kvbridge.folding import fold, fold_if_not_dearer
from kvbridge.forms import FORMS, Form, ResidualBranch, SharedBasis, flops_per_token
from kvbridge.kernels import FormMap
from kvbridge.kernels.reference import residual_branch, rows_of
from kvbridge.layout import BridgeMap
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from kvbridge.variables import Span
from tiny_branch import BATCH, JOINT, NATIVE, REST, TOKENS, make_basis, make_branch, make_states, pair, row, width
from tiny_bridge import JSON, forge_config, load_or_refuse, random_form, same_bridge
from tiny_models import kv_model, random_ids, relative_error

STREAM = Span("target.residual", 3, 4)
ALL = (Span("target.keys", 0, 4), Span("target.values", 0, 4))
OPTIONS = ("inputs", "outputs", "activation", "kv_heads", "head_dim")
SPANS = st.lists(st.sampled_from(("source.keys[0:3]", "source.values[0:3]", "target.keys[0:4]", "target.values[0:4]")))
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


def expected_row(form: ResidualBranch, x: Tensor) -> Tensor:
    """`φ(x A + a) B + b` in fp64."""
    between = x.double() @ form.reduce.double() + form.offset.double()
    if form.activation == "quadratic":
        between = between[..., : form.rank] * between[..., form.rank :]
    elif form.activation == "gelu":
        between = between * (1 + torch.erf(between / 2**0.5)) / 2
    return between @ form.expand.double() + form.bias.double()


def frozen_on(name: str) -> tuple[Form, ...]:
    """A map of all layers of the target, of one kind of form or of several."""
    first = make_basis(JOINT, ALL[:1])
    return {
        "slots": tuple(random_form(kind, pair()) for kind in ("keys", "values")),
        "full": (make_basis(JOINT, ALL, None),),
        "shared": (first, replace(make_basis(JOINT, ALL[1:]), reduce=first.reduce)),
        "mixed": (random_form("keys", pair()), make_basis(JOINT, ALL[1:])),
    }[name]


frozen = pytest.mark.parametrize("name", ["slots", "full", "shared", "mixed"])


def difference(one: ContentStates, other: ContentStates) -> list[Tensor]:
    return [getattr(one, kind).double() - getattr(other, kind).double() for kind in ("keys", "values")]


@activations
@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("inputs", [JOINT, JOINT + NATIVE], ids=["source", "native-too"])
def test_adds_what_the_equation_says(inputs: tuple[Span, ...], rank: int, activation: str) -> None:
    frozen, branch = make_basis(inputs, (*REST, STREAM)), make_branch(inputs, (*REST, STREAM), activation, rank)
    source, native = make_states("source"), make_states("target", 2, (1,))
    for layers, places in ((range(2, 4), REST), (range(2, 3), [Span(span.variable, 2, 3) for span in REST])):
        with_branch, without = (FormMap(forms).apply(source, layers, native) for forms in ((branch, frozen), (frozen,)))
        for batch in range(BATCH):
            for token in range(TOKENS):
                x = torch.cat([row(source if s.role == "source" else native, s, batch, token) for s in inputs])
                added, columns = expected_row(branch, x), branch.rows.places()
                for states in ("keys", "values"):
                    wanted = [added[columns[f"target.{states}", layer]] for layer in layers]
                    parts = [getattr(each, states)[:, batch, :, token].flatten(1) for each in (with_branch, without)]
                    assert relative_error(parts[0] - parts[1], torch.stack(wanted)) < 1e-4
                if layers.stop == 3:
                    found = with_branch.residual[3][batch, token] - without.residual[3][batch, token]
                    assert relative_error(found, added[columns["target.residual", 3]]) < 1e-4
        assert with_branch.residual.keys() == without.residual.keys() == ({3} if layers.stop == 3 else set())
        assert len(places) == 2


@activations
def test_sums_in_fp32_whatever_it_is_given(activation: str) -> None:
    branch = make_branch(JOINT, ALL, activation)
    rows = rows_of(JOINT, make_states("source"), None)
    for dtype in (torch.bfloat16, torch.float16):
        half = branch.to(dtype=dtype)
        assert half.expand.dtype == dtype
        assert torch.equal(half.reduce, branch.reduce)
        assert torch.equal(half.offset, branch.offset)
        assert torch.equal(half.bias, branch.bias)
        made = torch.cat([*residual_branch(half, rows.to(dtype), range(4)).values()], dim=-1)
        assert made.dtype == torch.float32
        assert relative_error(made, expected_row(half, rows.to(dtype))) < 1e-5


@frozen
@activations
def test_a_branch_of_zeros_changes_no_bit(name: str, activation: str) -> None:
    forms, branch = frozen_on(name), make_branch(JOINT, ALL, activation)
    zero = replace(branch, expand=torch.zeros_like(branch.expand), bias=torch.zeros_like(branch.bias))
    source = make_states("source")
    bare, same, other = (FormMap(each).apply(source, range(4)) for each in (forms, (*forms, zero), (*forms, branch)))
    assert torch.equal(bare.keys, same.keys)
    assert torch.equal(bare.values, same.values)
    assert all(part.abs().max() > 0.1 for part in difference(bare, other))


def test_several_branches_add_up_in_any_order() -> None:
    forms = frozen_on("mixed")
    branches = (make_branch(JOINT, ALL, "gelu"), make_branch(JOINT[:1], ALL[1:], "linear", 2))
    source = make_states("source")
    every = FormMap((*branches, *forms)).apply(source, range(4))
    wanted = FormMap(forms).apply(source, range(4)).values.double()
    for branch in branches:
        added = residual_branch(branch, rows_of(branch.inputs, source, None), range(4))[ALL[1]]
        wanted += added.unflatten(-1, (4, 4, 32)).permute(2, 0, 3, 1, 4)
    assert relative_error(every.values, wanted) < 1e-6


@activations
def test_branches_of_one_kind_become_one(activation: str) -> None:
    alike = [make_branch(JOINT, REST, activation, rank) for rank in (5, 2, 3)]
    other = make_branch(JOINT, REST, "linear" if activation == "gelu" else "gelu")
    joined = join_branches([alike[0], other, *alike[1:]])
    assert [branch.rank for branch in joined] == [10, 5]
    assert joined[1] is other
    x = torch.randn(TOKENS, width(JOINT))
    expected = torch.stack([expected_row(branch, x) for branch in alike]).sum(dim=0)
    torch.testing.assert_close(expected_row(joined[0], x), expected, atol=1e-5, rtol=1e-5)


def test_counts_its_products() -> None:
    p, per_layer = width(JOINT), 2 * 4 * 32
    gelu, quadratic = (make_branch(JOINT, (*REST, STREAM), name, 5) for name in ("gelu", "quadratic"))
    assert gelu.flops_per_token(range(2, 4)) == 2 * (p * 5 + 5 * 2 * per_layer)
    assert quadratic.flops_per_token(range(2, 3)) == 2 * (p * 10 + 5 * (per_layer + 128))
    assert gelu.flops_per_token(range(0, 2)) == 0
    forms = (make_basis(JOINT, (*REST, STREAM)), gelu, quadratic)
    assert flops_per_token(forms, range(2, 4)) == sum(form.flops_per_token(range(2, 4)) for form in forms)


def test_a_plan_must_give_what_a_branch_reads() -> None:
    outputs = (*ALL, STREAM)
    mapping = FormMap((make_basis(JOINT, outputs), make_branch(JOINT + NATIVE, outputs)))
    assert mapping.needs_native_head() == 1
    with pytest.raises(CacheError, match=r"layers up to 1, and plan\.native_head=null; give plan\.native_head=1"):
        mapping.require_plan(HandoffPlan(native_head=None), 4)
    mapping.require_plan(HandoffPlan(native_head=1, tail_recompute=1), 4)
    with pytest.raises(CacheError, match=r"which the map does not make; give plan\.tail_recompute=1, or another map"):
        FormMap((make_basis(JOINT, outputs), make_branch(JOINT, outputs))).require_plan(
            HandoffPlan(native_head=0, tail_recompute=2), 4
        )
    narrow = ContentStates(*torch.randn(2, 3, BATCH, 2, TOKENS, 8), torch.arange(TOKENS))
    native_only = FormMap((make_basis(NATIVE, REST), make_branch(JOINT, REST)))
    with pytest.raises(CacheError, match=r"reads 192 numbers per token from source\.keys\[0:3\], .* have 96 there"):
        native_only.apply(narrow, range(2, 4), make_states("target", 2, (1,)))


def test_a_branch_adds_only_to_what_another_form_makes() -> None:
    branch = make_branch(JOINT, ALL)
    with pytest.raises(CacheError, match=r"branch adds to target\.values of layer 0, which no other form of the map"):
        FormMap((make_basis(JOINT, ALL[:1]), branch))
    with pytest.raises(CacheError, match=r"branch adds to target\.residual of layer 3"):
        FormMap((make_basis(JOINT, ALL), make_branch(JOINT, (STREAM,))))
    with pytest.raises(CacheError, match=r"two forms of one map make target\.keys of layer 0"):
        FormMap((make_basis(JOINT, ALL), make_basis(JOINT, ALL[:1]), branch))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activation": "relu"}, r"the activation 'relu', expected one of linear, quadratic, gelu\."),
        ({"activation": "quadratic"}, r"rank 5 reduces to 5 numbers with an offset of 5, expected 10\."),
        ({"offset": torch.zeros(4)}, r"rank 5 reduces to 5 numbers with an offset of 4, expected 5\."),
        ({"reduce": torch.zeros(192, 0), "offset": torch.zeros(0), "expand": torch.zeros(0, 512)}, r"a rank of 1 or"),
        ({"bias": torch.zeros(511)}, r"expands to 512 numbers and has a bias of 511"),
        (
            {"outputs": REST[:1]},
            r"a residual-branch form expands to 512 numbers, which are not the rows of",
        ),
        ({"outputs": (Span("target.normed_residual", 0, 4),)}, r"makes target\.normed_residual\[0:4\]; expected"),
        ({"inputs": ()}, r"names no inputs or no outputs"),
        ({"expand": torch.zeros(5, 512, dtype=torch.int8)}, r"floating-point parts .* expand torch\.int8\[5, 512\]"),
    ],
    ids=["activation", "halves", "offset", "no-rank", "bias", "outputs", "normed", "no-inputs", "whole"],
)
def test_refuses_parts_that_do_not_fit(changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = make_branch(JOINT, REST)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(CacheError, match=sentence):
        replace(form, **changes)


# Under a plan: a map of zeros whose branch holds what makes the hand-off exact.

SAME = 4  # layers of the model that is source and target at once
HEAD = HandoffPlan(sinks=4, native_head=1, native_tail=6)
PLANS = {
    "native-head": HEAD,
    "attended": replace(HEAD, native_attended=0.25, scouts=3),
    "no-head": HandoffPlan(sinks=0, native_head=None, native_tail=1),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_branch_that_copies_gives_the_native_hand_off(plan: HandoffPlan) -> None:
    model, ids = kv_model("llama", layers=SAME), random_ids(40)
    q, heads = 2 * model.geometry.width, (model.geometry.kv_heads, model.geometry.head_dim)
    inputs = (Span("source.keys", 0, SAME), Span("source.values", 0, SAME))
    outputs = (Span("target.keys", 0, SAME), Span("target.values", 0, SAME))
    if plan.native_head is not None:
        # What the target has computed itself stands in for one source layer.
        inputs = (Span("target.keys", 0, 1), Span("source.keys", 1, SAME), inputs[1])
    zeros = SharedBasis(inputs, outputs, None, torch.zeros(q, q), torch.zeros(q), *heads)
    copies = ResidualBranch(
        inputs, outputs, "linear", torch.eye(q), torch.zeros(q), torch.eye(q), torch.zeros(q), *heads
    )
    states = model.content(model.read(ids))
    made, bare = (hand_off(model, plan, FormMap(forms), states, ids) for forms in ((zeros, copies), (zeros,)))
    native = model.prefill(ids)[1][:, -1]
    torch.testing.assert_close(made.logits, native, rtol=0, atol=2e-5)
    assert (bare.logits - native).abs().max() > 1e-2
    assert len(made.attended) == plan.attended(30 if plan.sinks else 39)


def test_a_branch_corrects_the_boundary_that_a_plan_recomputes_from() -> None:
    model, ids = kv_model("llama", layers=SAME), random_ids(40)
    hidden, each, heads = model.geometry.hidden_size, model.geometry.width // SAME, model.geometry.kv_heads
    plan = HandoffPlan(sinks=4, native_head=0, native_tail=6, tail_recompute=2)
    outputs = (Span("target.keys", 1, 2), Span("target.values", 1, 2), Span("target.residual", 2, 3))
    read, q = (Span("target.residual", 0, 1),), 2 * each + hidden
    whole = SharedBasis(read, outputs, None, torch.randn(hidden, q), torch.randn(q), heads, model.geometry.head_dim)
    zeros = replace(whole, expand=torch.zeros_like(whole.expand), bias=torch.zeros(q))
    eye = torch.eye(hidden)
    branch = ResidualBranch(
        read, outputs, "linear", eye, torch.zeros(hidden), whole.expand, whole.bias, heads, model.geometry.head_dim
    )
    states = model.content(model.read(ids))
    made, wanted, bare = (
        hand_off(model, plan, FormMap(forms), states, ids) for forms in ((zeros, branch), (whole,), (zeros,))
    )
    torch.testing.assert_close(made.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(bare.logits, wanted.logits, atol=1e-2)


# Folding


@frozen
@pytest.mark.parametrize("inputs", [JOINT, (Span("source.values", 1, 3),)], ids=["all", "some"])
@pytest.mark.parametrize("outputs", [ALL, REST, ALL[1:]], ids=["all", "last", "values"])
def test_a_folded_map_makes_the_same_states(name: str, inputs: tuple[Span, ...], outputs: tuple[Span, ...]) -> None:
    forms, branch = frozen_on(name), make_branch(inputs, outputs, "linear", 3)
    source, target = pair().source.geometry, pair().target.geometry
    folded = fold((*forms, branch), source, target)
    assert [type(form) for form in folded] == [type(form) for form in forms]
    states = make_states("source")
    unfolded = FormMap((*forms, branch)).apply(states, range(4))
    made, bare = (FormMap(each).apply(states, range(4)) for each in (folded, forms))
    for kind in ("keys", "values"):
        assert relative_error(getattr(made, kind), getattr(unfolded, kind)) < 2e-6
    assert any(part.abs().max() > 0.1 for part in difference(bare, made))


def test_a_folded_basis_reads_what_only_its_branch_read() -> None:
    forms, inputs = frozen_on("shared"), (*NATIVE, *JOINT[:1])
    branches = make_branch(inputs, ALL, "linear", 3), make_branch(JOINT, ALL, "gelu")
    folded = fold((*forms, *branches), pair().source.geometry, pair().target.geometry)
    keys, values, left = folded
    assert isinstance(keys, SharedBasis)
    assert isinstance(values, SharedBasis)
    assert keys.reduce is values.reduce
    assert keys.input_width == width((*JOINT, *NATIVE))
    assert left is branches[1]
    source, native = make_states("source"), make_states("target", 2, (1,))
    unfolded = FormMap((*forms, *branches)).apply(source, range(2, 4), native)
    made = FormMap(folded).apply(source, range(2, 4), native)
    assert relative_error(made.keys, unfolded.keys) < 2e-6
    assert relative_error(made.values, unfolded.values) < 2e-6


def test_what_folding_costs() -> None:
    source, target = pair().source.geometry, pair().target.geometry
    p, q, rank = width(JOINT), width(ALL), 3
    branch = make_branch(JOINT, ALL, "linear", rank)
    alone = branch.flops_per_token(range(4))
    assert alone == 2 * rank * (p + q)
    costs = {}
    for name in ("slots", "full", "shared"):
        forms = frozen_on(name)
        bare, folded = (flops_per_token(each, range(4)) for each in (forms, fold((*forms, branch), source, target)))
        costs[name] = bare, folded
        kept = fold_if_not_dearer((*forms, branch), source, target)
        assert (len(kept) == len(forms)) == (folded <= bare + alone)
    # Every slot-affine head reads 4 of 12 slots, all 12 afterwards; a full-rank map has room for the branch.
    assert costs["slots"] == (2 * (p // 3) * q, 2 * p * q)
    assert costs["full"] == (2 * p * q, 2 * p * q)
    assert costs["shared"] == (2 * 5 * (p + q), 2 * (5 + rank) * (p + q))


def test_only_slots_are_folded_into_slots() -> None:
    forms, branch = frozen_on("slots"), make_branch(JOINT + NATIVE, ALL, "linear")
    source, target = pair().source.geometry, pair().target.geometry
    with pytest.raises(CacheError, match=r"reads target\.keys\[0:2\] cannot be folded into a slot-affine form, which"):
        fold((*forms, branch), source, target)
    assert fold_if_not_dearer((*forms, branch), source, target) == (*forms, branch)
    nonlinear = (*forms, make_branch(JOINT, ALL, "quadratic"))
    assert fold(nonlinear, source, target) == nonlinear


# In a bridge


def bridge_of(*forms: Form) -> Bridge:
    mapper = {"name": "joint", "residual": {"kind": "gelu", "rank": 5}}
    return Bridge({"low": BridgeMap(forms, mapper)}, pair().identity(), pair().describe())


@activations
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_a_bridge_keeps_a_branch(storage: str, activation: str, tmp_path: Path) -> None:
    branch = make_branch(JOINT, ALL, activation)
    given = bridge_of(*frozen_on("shared"), branch)
    given.save_pretrained(tmp_path / "bridge", dtype=storage)
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair())
    *_, found = loaded.map().forms
    assert isinstance(found, ResidualBranch)
    assert found.options() == branch.options()
    assert torch.equal(found.offset, branch.offset)
    assert torch.equal(found.bias, branch.bias)
    assert same_bridge(loaded, given) == (storage == "float32")
    assert loaded.parameters() == given.parameters()
    states = make_states("source")
    made, wanted = (FormMap(each.map().forms).apply(states, range(4)) for each in (loaded, given))
    limit = {"float32": 0, "bfloat16": 5e-3, "int8": 2e-2}[storage]
    assert relative_error(made.keys, wanted.keys) <= limit


@activations
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_no_storage_spoils_a_branch_whose_inputs_were_whitened(storage: str, activation: str, tmp_path: Path) -> None:
    """Inputs that are almost a few directions: whitened weights are large and cancel."""
    p, rank = width(JOINT), 8
    axes = torch.linalg.qr(torch.randn(p, p)).Q
    spread = torch.logspace(0, -3.5, p)
    branch = make_branch(JOINT, ALL, activation, rank)
    whitened = axes / spread @ torch.randn(p, branch.reduce.shape[1]) / p**0.5
    branch = replace(branch, reduce=whitened)
    bridge_of(*frozen_on("slots"), branch).save_pretrained(tmp_path / "bridge", dtype=storage)
    stored = Bridge.from_pretrained(tmp_path / "bridge").map().forms[2]
    assert isinstance(stored, ResidualBranch)
    assert torch.equal(stored.reduce, branch.reduce)
    rows = torch.randn(1, 64, p) * spread @ axes.T
    wanted, kept, shortened = (
        torch.cat([*residual_branch(form, rows, range(4)).values()], dim=-1)
        for form in (branch, stored, replace(stored, reduce=whitened.to(torch.bfloat16).float()))
    )
    assert relative_error(kept, wanted) < 0.02
    assert relative_error(shortened, wanted) > 0.1


def test_a_bridge_shows_its_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bridge = bridge_of(*frozen_on("slots"), make_branch(JOINT, ALL, "gelu"))
    bridge.save_pretrained(tmp_path / "bridge")
    assert "with a gelu branch of rank 5;" in (tmp_path / "bridge" / "README.md").read_text()
    print_bridge(bridge, "here")
    shown = " ".join(capsys.readouterr().out.split())
    assert "residual_branch (gelu, rank 5) → target.keys[0:4], target.values[0:4]" in shown


LIES = {
    "activation": (lambda form: form.update(activation="relu"), r"form 2 of map low is inconsistent: .*'relu'"),
    "no-activation": (lambda form: form.pop("activation"), r"form 2 of map low lacks 'activation'"),
    "other-activation": (lambda form: form.update(activation="quadratic"), r"expected 10"),
    "inputs": (lambda form: form.update(inputs=["source.keys[0:3]"]), r"its own geometry says 96 and 1024"),
    "beyond": (lambda form: form.update(inputs=["source.keys[0:3]", "source.values[1:4]"]), r"has no source"),
    "outputs": (lambda form: form.update(outputs=["target.keys[0:4]"]), r"not the rows of target\.keys\[0:4\]"),
    "other-layers": (
        lambda form: form.update(outputs=["target.keys[0:4]", "target.residual[0:4]"]),
        r"branch adds to target\.residual of layer 0",
    ),
    "another-form": (lambda form: form.update(form="shared_basis", reduce=2), r"form 2 of map low is inconsistent"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_bridge_refuses_a_branch_that_its_config_does_not_describe(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    bridge_of(*frozen_on("slots"), make_branch(JOINT, ALL)).save_pretrained(tmp_path / "bridge")
    change, sentence = LIES[lie]
    forge_config(tmp_path / "bridge", lambda config: change(config["maps"]["low"]["forms"][2]))
    with pytest.raises(ArtifactError, match=sentence) as caught:
        Bridge.from_pretrained(tmp_path / "bridge")
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(("form", *OPTIONS)),
    value=JSON | SPANS | st.sampled_from((*ACTIVATIONS, *FORMS, 1, 2, 4, 32)),
    storage=st.sampled_from(("float32", "int8")),
)
def test_whatever_a_config_says_of_a_branch_is_refused_or_changes_no_number(
    name: str, value: Any, storage: str
) -> None:
    branch = make_branch(JOINT, ALL)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        bridge_of(*frozen_on("slots"), branch).save_pretrained(Path(folder) / "bridge", dtype=storage)
        stored = load_or_refuse(Path(folder) / "bridge")
        assert stored is not None
        forge_config(Path(folder) / "bridge", lambda config: config["maps"]["low"]["forms"][2].update({name: value}))
        loaded = load_or_refuse(Path(folder) / "bridge")
        if loaded is not None:
            found, wanted = (each.map().forms[2].tensors() for each in (loaded, stored))
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
            # A span may stand for another of the same width, and linear for GELU.
            same = {"form": branch.name} | branch.options()
            assert value == same.get(name) or name in ("inputs", "outputs", "activation")
