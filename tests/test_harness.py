"""A pair inside lm-eval: the native arm is lm-eval's own Hugging Face model, and every context is read once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from kvbridge import cli
from kvbridge.errors import PlanError, UsageError
from kvbridge.eval import harness
from kvbridge.eval.arms import Reading
from kvbridge.eval.harness import PairLM
from kvbridge.eval.sampling import Sampling
from kvbridge.forms import KINDS, Map
from kvbridge.kernels import FormMap
from kvbridge.mappers.identity import identity_form
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from tiny_bridge import random_bridge
from tiny_pair import save_pair, sentences, tiny_pair

PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
CONTEXTS = sentences(3, 8)
CHOICES = (" amber", " basil cedar", " x")


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def twins() -> ModelPair:
    """The target carries its own states: with the identity map, mapped must equal native."""
    pair = tiny_pair()
    return ModelPair(pair.target, pair.target, pair.tokenizer, pair.tokenizer_fingerprint)


def identity_map(pair: ModelPair) -> Map:
    return FormMap(tuple(identity_form(kind, pair.target.geometry) for kind in KINDS))


def random_map(pair: ModelPair) -> FormMap:
    return FormMap.of(random_bridge(pair))


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, at) for at, given in enumerate(arguments)]


def choices(contexts: list[str] = CONTEXTS) -> list[Instance]:
    return asked("loglikelihood", *((context, choice) for context in contexts for choice in CHOICES))


def hugging_face(pair: ModelPair, role: str = "target") -> HFLM:
    pair.tokenizer.pad_token = pair.tokenizer.eos_token
    model: Any = getattr(pair, role).model
    return HFLM(pretrained=model, tokenizer=pair.tokenizer, batch_size=1, max_length=pair.max_positions)


def same(given: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [score for score, _ in given] == pytest.approx([score for score, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in given] == [greedy for _, greedy in expected]


@pytest.mark.parametrize(("arm", "role"), [("native", "target"), ("source", "source")])
def test_an_arm_without_a_hand_off_is_lm_evals_own_model(pair: ModelPair, arm: str, role: str) -> None:
    requests = [*choices(), *asked("loglikelihood", ("", "amber basil"), ("cedar ", "delta"))]
    same(PairLM(pair, arm, PLAN).loglikelihood(requests), hugging_face(pair, role).loglikelihood(requests))


def test_mapped_with_native_states_is_native(twins: ModelPair) -> None:
    mapped, native = PairLM(twins, "mapped", PLAN, identity_map(twins)), PairLM(twins, "native", PLAN)
    same(mapped.loglikelihood(choices()), native.loglikelihood(choices()))
    assert (mapped.counts.read, mapped.counts.carried) == (3, 3)
    assert native.counts.carried == 0


def test_a_map_that_is_wrong_changes_the_scores(pair: ModelPair) -> None:
    mapped, native = PairLM(pair, "mapped", PLAN, random_map(pair)), PairLM(pair, "native", PLAN)
    pairs = zip(mapped.loglikelihood(choices()), native.loglikelihood(choices()), strict=True)
    assert max(abs(mine[0] - other[0]) for mine, other in pairs) > 0.1


def test_each_context_is_mapped_once(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []

    def counted(*arguments: Any) -> Any:
        handed.append(arguments[-1])
        return hand_off(*arguments)

    hand_off = harness.hand_off
    monkeypatch.setattr(harness, "hand_off", counted)
    model = PairLM(pair, "mapped", PLAN, random_map(pair))
    # Neighbours do not share a context.
    requests = asked("loglikelihood", *((context, choice) for choice in CHOICES for context in CONTEXTS))
    shuffled = model.loglikelihood(requests)
    assert len(handed) == model.counts.read == model.counts.carried == len(CONTEXTS)
    ordered = PairLM(pair, "mapped", PLAN, random_map(pair)).loglikelihood(choices())
    assert len(shuffled) == len(ordered)


def test_requests_come_back_in_their_order(pair: ModelPair) -> None:
    model = PairLM(pair, "native", PLAN)
    requests = asked("loglikelihood", *((context, choice) for choice in CHOICES for context in CONTEXTS))
    alone = [PairLM(pair, "native", PLAN).loglikelihood([request])[0] for request in requests]
    same(model.loglikelihood(requests), alone)


def test_a_short_context_is_read_natively_and_counted(pair: ModelPair) -> None:
    mapped = PairLM(pair, "mapped", PLAN, random_map(pair))
    requests = asked("loglikelihood", ("amber", " basil"), (CONTEXTS[0], " basil"))
    scores = mapped.loglikelihood(requests)
    assert (mapped.counts.read, mapped.counts.carried) == (2, 1)
    same(scores[:1], PairLM(pair, "native", PLAN).loglikelihood(requests[:1]))


def test_long_contexts_are_cut_on_the_left_before_both_models(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    long = " ".join(sentences(20, 8))
    read: list[int] = []

    def watched(model: Any, prompt: Any) -> Reading:
        read.append(prompt.shape[1])
        return read_prompt(model, prompt)

    read_prompt = harness.read_prompt
    monkeypatch.setattr(harness, "read_prompt", watched)
    requests = asked("loglikelihood", (long, " amber"))
    native = PairLM(pair, "native", PLAN)
    same(native.loglikelihood(requests), hugging_face(pair).loglikelihood(requests))
    mapped = PairLM(pair, "mapped", PLAN, random_map(pair))
    mapped.loglikelihood(requests)
    # The last of six bytes is predicted and not read.
    assert read == [pair.max_positions - 5] * 2
    assert (native.counts.truncated, mapped.counts.truncated) == (1, 1)


def test_refuses_continuations_that_leave_no_room(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match=r"^\d+ tokens after the context leave no room for it: .* up to 512 tokens"):
        PairLM(pair, "native", PLAN).loglikelihood(asked("loglikelihood", ("amber", " basil" * 100)))


@pytest.mark.parametrize("until", [[], ["e"], ["zzz", "a"], "i"], ids=repr)
def test_native_generation_is_lm_evals_own(pair: ModelPair, until: Any) -> None:
    settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
    requests = asked("generate_until", *((context, settings) for context in CONTEXTS))
    native = PairLM(pair, "native", PLAN).generate_until(requests)
    assert native == hugging_face(pair).generate_until(requests)


def test_generation_stops_at_a_string_and_leaves_it_out(pair: ModelPair) -> None:
    free = PairLM(pair, "native", PLAN).generate_until(
        asked("generate_until", (CONTEXTS[0], {"until": [], "max_gen_toks": 12}))
    )[0]
    stop = free[3:5]
    steps: list[int] = []
    model = PairLM(pair, "native", PLAN)
    choose = Sampling.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "choose", lambda self, logits: steps.append(1) or choose(self, logits))
        stopped = model.generate_until(asked("generate_until", (CONTEXTS[0], {"until": [stop], "max_gen_toks": 12})))[0]
    assert stopped == free.split(stop)[0]
    assert len(steps) < 12


def test_mapped_generation_goes_on_from_the_carried_cache(twins: ModelPair) -> None:
    requests = asked("generate_until", *((context, {"until": [], "max_gen_toks": 8}) for context in CONTEXTS))
    mapped = PairLM(twins, "mapped", PLAN, identity_map(twins))
    assert mapped.generate_until(requests) == PairLM(twins, "native", PLAN).generate_until(requests)
    assert mapped.counts.carried == len(CONTEXTS)


def test_sampling_is_seeded_and_repeats_differ(pair: ModelPair) -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
    requests = asked("generate_until", *[(CONTEXTS[0], settings)] * 3)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        model = PairLM(pair, "native", PLAN)
        drawn.append(model.generate_until(requests))
        assert model.counts.read == 1
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(), {3}),
        (Sampling(1.0, top_k=2), {3, 1}),
        (Sampling(1.0, top_p=0.6), {3}),
        (Sampling(1.0, top_p=0.7), {3, 1}),
        (Sampling(1.0), {0, 1, 2, 3}),
    ],
    ids=repr,
)
def test_sampling_keeps_the_likeliest(sampling: Sampling, allowed: set[int]) -> None:
    logits = torch.tensor([[0.05, 0.25, 0.06, 0.64]]).log()
    assert {int(sampling.choose(logits)) for _ in range(300)} == allowed


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"num_beams": 4},
            r"^generation setting num_beams=4 is not supported; expected until, max_gen_toks, do_sample",
        ),
        ({"do_sample": True, "temperature": -1.0}, r"expected temperature ≥ 0"),
        ({"do_sample": True, "top_p": 1.5}, r"0 < top_p ≤ 1"),
    ],
    ids=["beams", "temperature", "top_p"],
)
def test_refuses_generation_settings(pair: ModelPair, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        PairLM(pair, "native", PLAN).generate_until(asked("generate_until", (CONTEXTS[0], {"until": []} | settings)))


def test_rolling_scores_whole_texts_as_lm_eval_does(pair: ModelPair) -> None:
    requests = asked("loglikelihood_rolling", (CONTEXTS[0],), (" ".join(sentences(20, 8)),))
    native = PairLM(pair, "native", PLAN).loglikelihood_rolling(requests)
    assert native == pytest.approx(hugging_face(pair).loglikelihood_rolling(requests), abs=2e-2)


def test_rolling_is_refused_where_a_cache_is_carried(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match=r"loglikelihood_rolling.*use `kvbridge eval`.*or arm=native or source\.$"):
        PairLM(pair, "mapped", PLAN, random_map(pair)).loglikelihood_rolling(asked("loglikelihood_rolling", ("a",)))


def test_refuses_what_cannot_be_an_arm(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match=r"^arm=other: expected one of source, native, mapped\.$"):
        PairLM(pair, "other", PLAN)
    with pytest.raises(UsageError, match=r"^arm=mapped needs a map; give bridge=DIR\.$"):
        PairLM(pair, "mapped", PLAN)
    with pytest.raises(PlanError, match="native_head=9"):
        PairLM(pair, "native", HandoffPlan(native_head=9))


@pytest.fixture(scope="module")
def saved(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saved")
    source, target = save_pair(tiny_pair(), folder)
    random_bridge(pair).save_pretrained(folder / "bridge")
    return {"source": str(source), "target": str(target), "bridge": str(folder / "bridge"), "dtype": "float32"}


def test_model_arguments_make_a_model(saved: dict[str, Any]) -> None:
    given = ",".join(f"{name}={value}" for name, value in saved.items())
    model = get_model("kvbridge").create_from_arg_string(
        f"{given},arm=mapped,sinks=1,native_head=null,native_tail=2,native_attended=0.25,scouts=2",
        {"batch_size": 1, "device": "cuda:0"},
    )
    assert isinstance(model, PairLM)
    assert (model.arm, model.plan) == ("mapped", HandoffPlan(1, None, 2, native_attended=0.25, scouts=2))
    assert model.pair.target.dtype == torch.float32
    assert model.mapping is not None
    assert str(model.device) == "cpu" or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"bridgee": "x"}, r"^--model_args has bridgee; expected source, target,"),
        ({"source": None}, r"^--model_args la"),
    ],
    ids=["unknown", "missing"],
)
def test_refuses_model_arguments(saved: dict[str, Any], changed: dict[str, Any], sentence: str) -> None:
    given = {name: value for name, value in (saved | changed).items() if value is not None}
    with pytest.raises(UsageError, match=sentence):
        PairLM.create_from_arg_obj(given)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbridge", "lm-eval", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(sys.argv[1:]))
    arguments = ["--model", "kvbridge", "--model_args", "source=a,target=b", "--tasks", "arc_easy", "--limit", "3"]
    assert run_cli(monkeypatch, *arguments) == 0
    assert seen == [arguments]
    assert get_model("kvbridge") is PairLM


def test_the_command_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbridge.eval.retention.find_spec", lambda _: None)
    assert run_cli(monkeypatch, "--tasks", "arc_easy") == 2
    said = "kvbridge: error: benchmark tasks need lm-eval, which is not installed: pip install 'kvbridge[lm-eval]'.\n"
    assert capsys.readouterr().err == said


def test_an_error_of_ours_inside_lm_eval_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise UsageError("this cannot be")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    assert run_cli(monkeypatch, "--tasks", "arc_easy") == 2
    assert capsys.readouterr().err == "kvbridge: error: this cannot be\n"
