"""Two runs compared: by hand, in words, and on the command line."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge import cli
from kvbridge.errors import UsageError
from kvbridge.eval.compare import compare_runs, detectable_difference, documents_needed
from kvbridge.eval.fidelity import METRICS
from made_results import results


def changed(found: dict[str, Any], differences: list[float], metric: str = "kl") -> dict[str, Any]:
    """The same run with `metric` of the mapped arm moved document by document."""
    other = copy.deepcopy(found)
    for document, difference in zip(other["documents"], differences, strict=True):
        document["mapped"][metric] += difference
    return other


def of(metric: str, a: dict[str, Any], b: dict[str, Any]) -> Any:
    return next(found for found in compare_runs(("first", a), ("second", b)).differences if found.metric == metric)


def test_a_difference_by_hand() -> None:
    found = results(documents=30)
    differences = [-0.1 + 0.01 * (n % 3) for n in range(30)]
    kl = of("kl", found, changed(found, differences))
    assert kl.difference == pytest.approx(np.mean(differences))
    assert kl.ci95[0] < kl.difference < kl.ci95[1] < 0
    assert kl.better == "B"
    assert kl.sentence == "second is better: its KL is lower by 0.0900."
    # (1.95996 + 0.84162) s / √n
    assert kl.detectable == pytest.approx(2.80158 * np.std(differences, ddof=1) / 30**0.5, rel=1e-4)
    standard_error = np.std(differences, ddof=1) / 30**0.5
    assert kl.ci95[1] - kl.ci95[0] == pytest.approx(2 * 1.96 * standard_error, rel=0.15)


def test_the_sides_are_told_apart() -> None:
    found = results(documents=30)
    assert of("kl", changed(found, [-0.1] * 30), found).better == "A"
    assert of("top1", found, changed(found, [0.1] * 30, "top1")).better == "B"
    assert of("acceptance", found, changed(found, [-0.1] * 30, "acceptance")).better == "A"


def test_noise_is_called_noise_and_says_what_it_would_take() -> None:
    found = results(documents=20)
    kl = of("kl", found, changed(found, [0.05 if n % 2 else -0.04 for n in range(20)]))
    assert kl.better is None
    assert "cannot be told apart: 20 documents find a difference of 0.02" in kl.sentence
    spread = np.std([0.05, -0.04] * 10, ddof=1)
    assert f"one of 0.0050, as seen, takes about {documents_needed(float(spread), 0.005):,} documents" in kl.sentence
    assert documents_needed(1.0, 0.5) == 32  # (2.80158 / 0.5)² = 31.4


def test_the_power_is_that_of_a_simulation() -> None:
    generator, count = np.random.default_rng(0), 40
    difference = detectable_difference(1.0, count)
    means = generator.normal(difference, 1 / count**0.5, size=20_000)
    assert (means > 1.95996 / count**0.5).mean() == pytest.approx(0.8, abs=0.01)


def test_the_gap_is_compared_as_a_ratio() -> None:
    found = results(documents=30)
    better = changed(found, [-0.04 - 0.001 * (n % 5) for n in range(30)], "nll")
    gap = of("gap_recovered", found, better)
    assert gap.a == pytest.approx(0.75)
    assert gap.difference == pytest.approx(0.042 / 0.4)
    assert gap.better == "B"
    spread = np.std([0.001 * (n % 5) / 0.4 for n in range(30)], ddof=1)
    assert gap.detectable == pytest.approx(detectable_difference(float(spread), 30))


def test_a_gap_within_noise_is_not_compared() -> None:
    found = results({**dict.fromkeys(("native", "mapped", "source"), (0.1, 1.0))})
    gap = of("gap_recovered", found, found)
    assert (gap.difference, gap.better) == (None, None)
    assert gap.sentence.startswith("The gap recovered cannot be compared: ")


def test_the_same_run_twice_is_the_same() -> None:
    found = results()
    for difference in compare_runs(("a", found), ("b", found)).differences:
        assert difference.difference == 0
        assert "is the same on every document" in difference.sentence


def test_documents_are_matched_by_id_not_by_place() -> None:
    found = results(documents=6)
    shuffled = copy.deepcopy(found)
    shuffled["documents"].reverse()
    assert of("kl", found, shuffled).difference == pytest.approx(0)
    assert of("kl", found, shuffled).detectable == pytest.approx(0)


def test_shared_documents_only_and_notes() -> None:
    found = results(documents=25)
    part = copy.deepcopy(found)
    part["documents"] = part["documents"][:12]
    part["pair"]["target"]["fingerprint"] = "e" * 16
    part["run"]["settings"]["eval"] |= {"prompt": 99}
    comparison = compare_runs(("all", found), ("part", part))
    assert comparison.documents == 12
    notes = " ".join(comparison.notes)
    for note in ("Only 12 of the 25 documents of all", "large models differ", "eval.prompt", "12 documents are few"):
        assert note in notes
    assert compare_runs(("a", found), ("b", found)).notes == []


def test_repeated_ids_are_paired_in_order() -> None:
    found = results(documents=4)
    for document in found["documents"]:
        document["id"] = "same"
    assert compare_runs(("a", found), ("b", found)).documents == 4


def test_one_document_tells_nothing() -> None:
    found = results(documents=1)
    kl = of("kl", found, changed(found, [-0.1]))
    assert (kl.better, kl.detectable) == (None, None)
    assert "with one document" in kl.sentence


def test_nothing_in_common_is_refused() -> None:
    other = results()
    for document in other["documents"]:
        document["id"] += "x"
    with pytest.raises(UsageError, match="scored no document in common"):
        compare_runs(("a", results()), ("b", other))


# On the command line


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    found = results(documents=25)
    for name, run in (("one[red]", found), ("two", changed(found, [-0.1] * 25))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(run))
    return ["one[red]", "two"]


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["kvbridge", "compare", *arguments])
    capsys.readouterr()
    try:
        cli.main()
    except SystemExit as stop:
        return int(str(stop.code)), *capsys.readouterr()
    return 0, *capsys.readouterr()


def test_the_table_and_the_words(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, errors = said(monkeypatch, capsys, *folders)
    assert (code, errors) == (0, "")
    assert "A  one[red]  (7.0% of the target's prefill FLOPs)" in out
    assert "two is better: its KL is lower by 0.1000." in out
    assert "found with 80 % power" in out


def test_json_for_machines(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(monkeypatch, capsys, *folders, "--json")
    found = json.loads(out)
    assert (code, found["documents"]) == (0, 25)
    assert [one["metric"] for one in found["differences"]] == ["gap_recovered", *METRICS]
    assert found["differences"][1]["better"] == "B"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "takes the out= folders of two finished runs"),
        (["two"], "takes the out= folders of two finished runs"),
        (["two", "none"], "none holds no results.json"),
        (["two", "two", "--yaml"], "--yaml is no option of kvbridge compare"),
    ],
    ids=["none", "one", "missing", "option"],
)
def test_refuses(
    arguments: list[str], sentence: str, folders: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, _, errors = said(monkeypatch, capsys, *arguments)
    assert code == 2
    assert errors.startswith("kvbridge: error: ")
    assert sentence in errors


def test_another_text_or_format_is_noted() -> None:
    first, second = results(documents=30), results(documents=30)
    first["run"]["text"], second["run"]["text"] = "one", "two"
    second["run"]["settings"]["eval"]["format"] = "chat"
    notes = " ".join(compare_runs(("first", first), ("second", second)).notes)
    assert "The evaluation texts differ: documents of one id may not be the same." in notes
    assert "The runs differ in eval.format: other positions are scored." in notes
