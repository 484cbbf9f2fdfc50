"""Verdicts in plain words, and pages made from results alone."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbridge.errors import UsageError
from kvbridge.eval.report import reproduce, write_report
from kvbridge.eval.verdict import verdict
from made_results import ARMS, results


def _texts(found: dict[str, Any]) -> str:
    return " ".join(finding.text for finding in verdict(found))


def test_verdict_of_a_good_map() -> None:
    findings = verdict(results())
    assert [finding.tone for finding in findings] == ["good", "good", "good", "plain", "plain"]
    assert "recovers 75 % of the gap" in findings[0].text
    assert "at 7.0 % of the large model's prefill" in findings[0].text
    assert "reading the last 30 tokens alone" in findings[2].text
    assert "4.0 times as fast" in findings[4].text
    assert "2.0 times as fast" in findings[4].text


def test_verdict_of_a_map_worse_than_the_source() -> None:
    findings = verdict(results(ARMS | {"mapped": (0.8, 1.8)}))
    assert findings[0].tone == "bad"
    assert "worse than the small model alone" in findings[0].text
    assert [finding.tone for finding in findings[1:3]] == ["bad", "bad"]
    assert "further from the large model than the small model alone" in findings[1].text


def test_verdict_of_a_map_as_good_as_the_source() -> None:
    found = results()
    found["arms"]["mapped"]["gap_recovered"] = {"mean": -0.1, "ci95": [-0.5, 0.3], "n": 9}
    headline = verdict(found)[0]
    assert headline.tone == "plain"
    assert "cannot be told apart from the small model alone: it recovers -10 % of the gap" in headline.text


def test_verdict_without_a_gap_says_so() -> None:
    findings = verdict(results(ARMS | {"source": (0.5, 1.0)}))
    assert findings[0].tone == "warning"
    assert "cannot be said" in findings[0].text


def test_verdict_warns_of_a_map_that_carries_nothing() -> None:
    assert "does not carry what the text said" in _texts(results(ARMS | {"other_document": (0.2, 1.1)}))


def test_verdict_starts_with_a_failed_injection() -> None:
    findings = verdict(results(ARMS | {"injected": (0.05, 1.0)}))
    assert findings[0].tone == "warning"
    assert "do not trust the other figures" in findings[0].text


def test_ties_are_called_ties() -> None:
    found = results()
    for number, document in enumerate(found["documents"]):
        document["source"]["kl"] = document["mapped"]["kl"] + (0.1 if number % 2 else -0.1)
    assert "cannot be told apart from the small model alone" in _texts(found)


def _write(folder: Path, found: dict[str, Any]) -> tuple[str, str]:
    (folder / "results.json").write_text(json.dumps(found))
    page, twin = write_report(folder)
    return page.read_text(), twin.read_text()


def test_pages_hold_every_arm_and_figure(tmp_path: Path) -> None:
    page, twin = _write(tmp_path, results())
    for name in ("mapped", "source (small model)", "native tail only", "other document", "no context"):
        assert name in page
        assert f"| {name} |" in twin
    assert page.count("<svg") == 5
    assert page.count("<summary>numbers</summary>") == 4
    assert "plan.native_head=null" in page
    assert "0.200" in twin or "0.220" in twin


def test_the_command_of_an_evaluation_names_its_bridge(tmp_path: Path) -> None:
    found = results()
    found["run"]["settings"] |= {"bridge": "runs/first/bridge"}
    _, twin = _write(tmp_path, found)
    assert "kvbridge eval \\\n  pair=local \\\n  bridge=runs/first/bridge" in twin
    assert "mapper" not in twin.split("## Reproduce")[1].split("```")[1]
    assert "calibration.corpus" not in twin


def test_the_command_of_a_trained_branch_names_its_settings_and_text(tmp_path: Path) -> None:
    found = results()
    residual = {"kind": "gelu", "rank": 32, "directions": None}
    found["run"]["settings"] |= {"moments": "runs/moments", "mapper": {"name": "joint", "residual": residual}}
    found["mapper"] = {"name": "joint", "native_head": None, "residual": residual}
    command = _write(tmp_path, found)[1].split("## Reproduce")[1]
    options = ("native_head=null", "residual.kind=gelu", "residual.rank=32", "residual.directions=null")
    for word in ("mapper=joint", *(f"mapper.{option}" for option in options)):
        assert word in command
    assert "moments=runs/moments" in command
    assert "calibration.corpus=" in command


def test_the_command_of_reused_moments_names_them_and_the_fitted_mapper(tmp_path: Path) -> None:
    found = results()
    found["run"]["settings"] |= {"moments": "runs/a b/calibration"}
    found["mapper"] = {"name": "ridge", "k": 3}
    _, twin = _write(tmp_path, found)
    assert "'moments=runs/a b/calibration'" in twin
    assert "mapper.k=3" in twin


def test_page_is_self_contained_and_its_ids_do_not_collide(tmp_path: Path) -> None:
    page, _ = _write(tmp_path, results())
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page)
    assert "@import" not in page
    defined = re.findall(r"<(?:clipPath|linearGradient) id=\"([^\"]+)\"", page)
    assert len(defined) == len(set(defined)) > 0


def test_markup_in_names_and_text_is_escaped(tmp_path: Path) -> None:
    found = copy.deepcopy(results())
    found["pair"]["source"]["name"] = "<script>alert(1)</script>"
    found["documents"][0]["id"] = "<img src=x>"
    page, _ = _write(tmp_path, found)
    assert "<script>" not in page
    assert "<img" not in page
    assert "a &lt;b&gt; continuation" in page


def test_report_is_reproducible(tmp_path: Path) -> None:
    assert _write(tmp_path, results()) == _write(tmp_path, results())


def test_results_without_reconstruction_or_samples_still_make_a_page(tmp_path: Path) -> None:
    bare = results() | {"reconstruction": {"rows_per_feature": None}, "selected_layers": {}, "samples": []}
    page, _ = _write(tmp_path, bare)
    assert page.count("<svg") == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "holds no results.json"),
        ("{", "is damaged"),
        ('{"schema": 99}', "has schema 99, expected 1"),
        ("[]", "has schema None, expected 1"),
    ],
    ids=["missing", "damaged", "newer", "not-an-object"],
)
def test_unusable_results_are_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(UsageError, match=sentence):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_values_are_quoted_for_hydra_and_the_shell() -> None:
    found = results()
    found["run"]["settings"]["eval"]["corpus"] = "it's, here.jsonl"
    words = shlex.split(reproduce(found).replace("\\\n", " "))
    parsed = OverridesParser.create().parse_overrides([word for word in words[2:] if word != "out=DIR"])
    values = {override.key_or_group: override.value() for override in parsed}
    assert values["eval.corpus"] == "it's, here.jsonl"


@pytest.mark.parametrize("place", ["arms.mapped", "run.versions", "cost.target_prefill_flops_share", "documents"])
def test_results_that_lack_a_part_are_damaged(place: str, tmp_path: Path) -> None:
    found = results()
    *parents, last = place.split(".")
    inner: Any = found
    for name in parents:
        inner = inner[name]
    del inner[last]
    with pytest.raises(UsageError, match=rf"is damaged \(it has no {re.escape(place)}\); delete it and evaluate again"):
        _write(tmp_path, found)
