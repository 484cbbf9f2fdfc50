"""The command line: what it writes, what it prints, and one sentence with exit code 2 for whatever it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from command_line import SCRIPT, Ran, Run, as_overrides, in_process_of_its_own, left, sentence
from kvbridge import cli
from kvbridge.bridge import Bridge
from kvbridge.cli import COMMANDS, commands
from kvbridge.errors import KVBridgeError
from kvbridge.eval import results as results_module
from kvbridge.eval.fidelity import METRICS
from kvbridge.eval.gate import GateReport
from kvbridge.mappers import Ridge
from kvbridge.model import KVModel
from kvbridge.pair import PairLoader
from kvbridge.plan import HandoffPlan
from tiny_pair import tiny_pair

ARMS = ["native", "mapped", "injected", "source", "tail_only", "other_document", "no_context"]


# Help


def test_help_needs_no_heavy_import(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "datasets", "hydra", "omegaconf", "numpy", "rich")
    code = (
        "import sys; from kvbridge.cli import main; sys.argv[1:] = ['--help']; main(); "
        f"print(sorted(set(sys.modules) & set({heavy})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout.startswith("usage: kvbridge COMMAND [OVERRIDE …]")
    for command in COMMANDS:
        assert re.search(rf"^  {command}  +\w", done.stdout, re.MULTILINE)


def test_settings_need_no_code_of_models() -> None:
    code = (
        "import sys; from kvbridge.cli.settings import register; register(); "
        "sys.exit('transformers.modeling_utils' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=["none", "-h", "--help"])
def test_help_and_nothing_print_the_usage(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvbridge", *arguments])
    cli.main()
    assert capsys.readouterr().out.strip() == cli.USAGE.strip()


def test_the_version_is_that_of_the_wheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvbridge import __version__

    monkeypatch.setattr(sys, "argv", ["kvbridge", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"kvbridge {__version__}\n"


def test_help_of_a_command_lists_groups_and_settings(kvbridge: Run) -> None:
    ran = kvbridge("run", "--help")
    assert (ran.code, ran.errors) == (0, [])
    assert "mapper: identity, joint, random, ridge, shared_basis" in ran.out
    for setting in ("native_tail: 16", "tokens: 2048", "resamples: 100", "out: runs/"):
        assert setting in ran.out


# A whole run


@pytest.fixture(scope="module")
def finished(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A folder with a finished run in `out`, and what the command said."""
    folder = tmp_path_factory.mktemp("finished")
    return folder / "out", in_process_of_its_own("run", *as_overrides(settings), "out=out", folder=folder)


@pytest.fixture(scope="module")
def results(finished: tuple[Path, Ran]) -> dict[str, Any]:
    return json.loads((finished[0] / "results.json").read_text())


def test_a_run_writes_its_files_and_says_how_it_went(finished: tuple[Path, Ran]) -> None:
    out, ran = finished
    assert (ran.code, ran.errors) == (0, [])
    bridge = {f"bridge/{name}" for name in ("README.md", "SHA256SUMS", "config.json", "model.safetensors")}
    assert left(out) >= {"results.json", "calibration/moments.safetensors"} | bridge
    assert not [name for name in left(out) if "partial" in name or "progress" in name]
    assert set(left(out.parent)) == {f"out/{name}" for name in left(out)}
    for arm in ARMS:
        assert arm.replace("_", " ").split()[0] in ran.out
    assert re.search(r"3 documents; the hand-off costs \d+\.\d% of the target's prefill FLOPs\.", ran.out)


def test_results_hold_what_their_schema_says(results: dict[str, Any]) -> None:
    documented = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)  +\w", results_module.__doc__ or "", re.MULTILINE)
    assert list(results) == [name for names in documented for name in names.split(", ")]
    assert results["schema"] == results_module.SCHEMA


def test_results_can_be_repeated_from_what_they_say(results: dict[str, Any], settings: dict[str, Any]) -> None:
    run = results["run"]
    assert set(run["versions"]) == {"python", *results_module.PACKAGES}
    assert run["seeds"] == {"calibration": 0, "eval": 0}
    assert (run["device"], run["dtype"]) == ("cpu", "float32")
    assert run["threads"] >= 1
    assert set(run["seconds"]) == {"calibrate", "fit", "documents"}
    for name, value in settings.items():
        group, option = name.split(".")
        assert run["settings"][group][option] == (str(value) if isinstance(value, Path) else value)
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", run["finished"])


def test_results_describe_pair_method_plan_and_calibration(results: dict[str, Any]) -> None:
    pair = tiny_pair()
    for role, model in (("source", pair.source), ("target", pair.target)):
        described = results["pair"][role]
        assert (described["name"], described["fingerprint"]) == (role, model.fingerprint)
        assert described["geometry"] == model.geometry.to_dict()
    assert results["pair"]["tokenizer"] == {"fingerprint": pair.tokenizer_fingerprint}
    assert results["mapper"] == {
        "name": "ridge",
        "k": 2,
        "penalty": 0.01,
        "scale": "absolute",
        "heads": "all",
        "first_positions": "excluded",
    }
    assert results["plan"] == HandoffPlan().to_dict()
    assert results["map"] == "ridge"
    assert results["calibration"]["rows"] == 2048
    assert results["calibration"]["identity"]["calibration.tokens"] == 2048


def test_results_hold_every_arm_metric_and_document(results: dict[str, Any]) -> None:
    assert list(results["arms"]) == ARMS
    assert [document["id"] for document in results["documents"]] == ["d0", "d1", "d2"]
    for arm, metrics in results["arms"].items():
        assert list(metrics) == [*METRICS, "gap_recovered"]
        for metric in METRICS:
            of_documents = [document[arm][metric] for document in results["documents"]]
            found = metrics[metric]
            assert found["mean"] == pytest.approx(sum(of_documents) / 3)
            assert found["ci95"][0] <= found["mean"] + 1e-12
            assert found["mean"] <= found["ci95"][1] + 1e-12
            assert found["n"] == 3
        assert "mean" in metrics["gap_recovered"]
        assert ("reason" in metrics["gap_recovered"]) == (metrics["gap_recovered"]["mean"] is None)
        assert len(results["by_position"][arm]["kl"]) == 96 - 80
        assert 1 <= len(results["by_position"][arm]["rollout_kl"]) <= 4


def test_results_say_that_the_map_is_a_map(results: dict[str, Any]) -> None:
    kl = {arm: metrics["kl"]["mean"] for arm, metrics in results["arms"].items()}
    assert kl["injected"] < 1e-5
    assert 1e-3 < kl["mapped"] < kl["other_document"]
    assert kl["mapped"] < kl["no_context"]


def test_results_hold_reconstruction_samples_and_cost(results: dict[str, Any]) -> None:
    for kind in ("keys", "values"):
        grid = results["reconstruction"][f"r2_{kind}"]
        assert [len(row) for row in grid] == [4] * 4
        assert all(0 < value < 1 + 1e-6 for row in grid for value in row)
        assert all(len(layers) == 2 and set(layers) <= {0, 1, 2} for layers in results["selected_layers"][kind])
    assert [sample["id"] for sample in results["samples"]] == ["d0", "d1"]
    for sample in results["samples"]:
        assert list(sample["continuations"]) == ARMS
        assert sample["prompt_end"]
        assert sample["gold"]
    cost = results["cost"]
    assert cost["target_prefill_flops_share"] == pytest.approx(sum(cost["flops_share_by_part"].values()))
    assert cost["cold_ttft_s"] > cost["warm_ttft_s"] > 0
    assert cost["prompt_tokens"] == 80
    positive = ("native_ttft_s", "source_ttft_s", "mapping_tokens_per_s", "peak_memory_bytes", "artifact_bytes")
    assert all(cost[name] > 0 for name in (*positive, "calibration_seconds", "equal_cost_tail"))


def test_the_bridge_of_a_run_is_one_for_its_pair(finished: tuple[Path, Ran], results: dict[str, Any]) -> None:
    bridge = Bridge.from_pretrained(finished[0] / "bridge", pair=tiny_pair())
    assert bridge.map().mapper == results["mapper"]
    assert bridge.calibration == results["calibration"]
    assert bridge.map().evidence["r2"]["keys"] == results["reconstruction"]["r2_keys"]


# Parts of a run


def per_document(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [{arm: document[arm] for arm in ARMS} | {"id": document["id"]} for document in results["documents"]]


def test_eval_of_the_bridge_gives_the_same_numbers(
    kvbridge: Run, finished: tuple[Path, Ran], results: dict[str, Any], tmp_path: Path
) -> None:
    ran = kvbridge("eval", f"bridge={finished[0]}/bridge", "out=again")
    assert (ran.code, ran.errors) == (0, [])
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    assert per_document(again) == per_document(results)
    assert again["arms"] == results["arms"]
    assert again["cost"]["artifact_bytes"] == results["cost"]["artifact_bytes"]
    assert not (tmp_path / "again" / "bridge").exists()


def test_fit_uses_finished_moments(kvbridge: Run, finished: tuple[Path, Ran], tmp_path: Path) -> None:
    ran = kvbridge("fit", f"moments={finished[0]}/calibration", "out=fitted")
    assert (ran.code, ran.errors) == (0, [])
    fitted, original = (Bridge.from_pretrained(at / "bridge") for at in (tmp_path / "fitted", finished[0]))
    assert fitted.fingerprint() == original.fingerprint()
    assert ran.out == f"fitted/bridge: {original.parameters():,} numbers\n"
    assert not (tmp_path / "fitted" / "calibration").exists()


def test_what_is_scored_is_what_was_stored(kvbridge: Run, finished: tuple[Path, Ran], tmp_path: Path) -> None:
    moments = f"moments={finished[0]}/calibration"
    assert kvbridge("run", moments, "storage=int8", "map=small", "out=small").code == 0
    small, usual = (json.loads((at / "results.json").read_text()) for at in (tmp_path / "small", finished[0]))
    assert (small["map"], small["mapper"]) == ("small", usual["mapper"])
    assert small["cost"]["artifact_bytes"] < 0.5 * usual["cost"]["artifact_bytes"]
    mapped = [results["arms"]["mapped"]["kl"]["mean"] for results in (small, usual)]
    assert mapped[0] != mapped[1]
    assert mapped[0] == pytest.approx(mapped[1], rel=0.2)
    assert "map=small" in (tmp_path / "small" / "report.md").read_text()
    ran = kvbridge("eval", "bridge=small/bridge", "map=large", "out=other")
    assert (ran.code, ran.errors) == (2, ["kvbridge: error: the bridge has no map 'large'; it has small."])
    assert kvbridge("eval", "bridge=small/bridge", "out=again").code == 0
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    assert again["arms"] == small["arms"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("storage=int4", "storage=int4: expected one of float32, bfloat16, int8."),
        ("map=a/b", "map=a/b: a map's name has letters, digits and _ . = , + - only."),
    ],
)
def test_refuses_a_storage_or_name_that_cannot_be(kvbridge: Run, override: str, sentence: str) -> None:
    ran = kvbridge("fit", override, "out=out")
    assert (ran.code, ran.errors) == (2, [f"kvbridge: error: {sentence}"])


def test_calibrate_and_fit_make_the_bridge_of_a_run(kvbridge: Run, finished: tuple[Path, Ran], tmp_path: Path) -> None:
    ran = kvbridge("calibrate", "out=parts")
    assert (ran.code, ran.errors) == (0, [])
    rows = "{'fit/first': 128, 'fit/rest': 1920, 'held_out/first': 16, 'held_out/rest': 240}"
    assert ran.out == f"parts/calibration/moments.safetensors: rows {rows}\n"
    assert kvbridge("fit", "out=parts").code == 0
    fitted, original = (Bridge.from_pretrained(at / "bridge") for at in (tmp_path / "parts", finished[0]))
    assert fitted.fingerprint() == original.fingerprint()


def test_a_fit_holds_one_model_at_a_time_and_none_while_it_solves(
    kvbridge: Run, finished: tuple[Path, Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, solve = PairLoader.load, Ridge.fit
    models: dict[str, weakref.ref[Any]] = {}
    steps: list[tuple[str, list[str]]] = []

    def take(step: str) -> None:
        steps.append((step, [role for role, model in models.items() if model() is not None]))

    def watched_load(self: PairLoader, role: str) -> KVModel:
        take(role)
        model = load(self, role)
        models[role] = weakref.ref(model.model)
        return model

    def watched_solve(*given: Any) -> Any:
        take("solve")
        return solve(*given)

    monkeypatch.setattr(PairLoader, "load", watched_load)
    monkeypatch.setattr(Ridge, "fit", watched_solve)
    ran = kvbridge("fit", f"moments={finished[0]}/calibration", "out=alone")
    assert (ran.code, ran.errors) == (0, [])
    assert steps == [("target", []), ("source", []), ("solve", [])]
    # The run held both models while it solved.
    alone, beside = (
        {name: (place / name).read_bytes() for name in left(place)}
        for place in (tmp_path / "alone/bridge", finished[0] / "bridge")
    )
    assert alone == beside


def test_a_second_run_in_the_same_folder_reuses_the_moments(
    kvbridge: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kvbridge("calibrate", "out=twice").code == 0
    before = (tmp_path / "twice/calibration/moments.safetensors").stat().st_mtime_ns
    assert kvbridge("run", "out=twice").code == 0
    assert (tmp_path / "twice/calibration/moments.safetensors").stat().st_mtime_ns == before


def test_inspect_says_what_a_bridge_is(kvbridge: Run, finished: tuple[Path, Ran], results: dict[str, Any]) -> None:
    out, _ = finished
    ran = kvbridge("inspect", f"bridge={out}/bridge", without=("pair.source", "pair.target"))
    assert (ran.code, ran.errors) == (0, [])
    lines = {line.split()[0]: line for line in ran.out.splitlines() if line.strip()}
    assert lines["bridge"].split()[1] == f"{out}/bridge"
    identity = tiny_pair().identity()
    assert f"3 layers, 2 KV heads × 16, RoPE default, fingerprint {identity['source']}" in lines["source"]
    assert f"4 layers, 4 KV heads × 32, RoPE default, fingerprint {identity['target']}" in lines["target"]
    assert "map ridge" in lines["map"]
    assert "ridge (k=2, penalty=0.01, scale=absolute, heads=all" in ran.out
    assert "slot_affine → target.keys[0:4], slot_affine → target.values[0:4]" in lines["forms"]
    assert lines["size"].split()[1:] == "0.07 M numbers, 0.13 MFLOP per token".split()
    assert lines["native"].split()[2:] == ["not", "needed"]
    assert lines["rows"].split()[3:] == ["30"]
    r2 = [sum(row) / len(row) for row in results["reconstruction"]["r2_keys"]]
    for layer, value in enumerate(r2):
        assert re.search(rf"^│ {layer} +│ [\d, –]+│ {value:.3f} ", ran.out, re.MULTILINE)


def test_inspect_shows_brackets_in_a_name(kvbridge: Run, finished: tuple[Path, Ran], tmp_path: Path) -> None:
    (tmp_path / "run[bold]").symlink_to(finished[0])
    assert "run[bold]/bridge" in kvbridge("inspect", "out='run[bold]'").out


def test_doctor_reports_both_models(kvbridge: Run) -> None:
    ran = kvbridge("doctor")
    assert (ran.code, ran.errors) == (0, [])
    assert re.search(r"^source: llama: 3 layers, 2 KV heads × 16, RoPE default; float32 on cpu$", ran.out, re.MULTILINE)
    assert re.search(r"^target: qwen3: 4 layers, .*keys normalised per head; float32 on cpu$", ran.out, re.MULTILINE)
    assert len(re.findall(r"^  gate passed: injected KL \S+ nats, limit 1e-06$", ran.out, re.MULTILINE)) == 2
    assert len(re.findall(r"^  control, [a-z ]+: \S+$", ran.out, re.MULTILINE)) == 6


def test_doctor_fails_with_the_gate(kvbridge: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    report = GateReport(injected=0.5, controls={"shifted positions": 1e-3}, limit=1e-3)
    monkeypatch.setattr("kvbridge.eval.identity_gate", lambda *_: report)
    ran = kvbridge("doctor")
    assert sentence(ran) == (
        "the gate failed for source and target: injected keys and values do not give native answers."
    )
    assert "gate FAILED: injected KL 5.0e-01 nats, limit 1e-03" in ran.out
    assert "control, shifted positions: 1.0e-03 (too weak to prove it)" in ran.out


# Probes


def test_eval_asks_probes_after_fidelity(
    kvbridge: Run, finished: tuple[Path, Ran], results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it asks, it keeps its documents even where other probes are asked afterwards."""
    given = [f"bridge={finished[0]}/bridge", "out=asked", "eval.probes.count=1", "eval.probes.tasks=[passkey]"]
    given.append("eval.probes.lengths=[320]")
    with monkeypatch.context() as patch:
        patch.setattr("kvbridge.eval.suite.ask_probes", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert kvbridge("eval", *given).code == 130
    documents = tmp_path / "asked" / "documents.partial.jsonl"
    before = documents.read_text()
    assert len(before.splitlines()) == 1 + 3
    with monkeypatch.context() as patch:
        patch.setattr("kvbridge.eval.suite.ask_probes", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr("kvbridge.eval.suite.standard_arms", lambda *_: {})
        assert kvbridge("eval", *given, "eval.probes.depths=[0.5]").code == 130
    assert documents.read_text() == before
    ran = kvbridge("eval", *given, "eval.probes.depths=[0,1]")
    assert (ran.code, ran.errors) == (0, [])
    assert re.search(r"^2 questions about the context, forced choice: native \d+%, mapped \d+%", ran.out, re.MULTILINE)
    asked = json.loads((tmp_path / "asked" / "results.json").read_text())
    assert asked["arms"] == results["arms"]
    assert results["probes"] is None
    assert [record["depth"] for record in asked["probes"]["records"]] == [0, 1]
    assert asked["probes"]["settings"] == asked["run"]["settings"]["eval"]["probes"]
    assert left(tmp_path) == {"asked/results.json", "asked/report.html", "asked/report.md", "asked/status.json"}
    assert "What the cache still holds" in (tmp_path / "asked" / "report.html").read_text()


# Refusals

REFUSED: dict[str, tuple[str, list[str], str]] = {
    "command": ("train", [], r"^'train' is no command; expected one of run, calibrate, fit, eval, .*doctor.*\.$"),
    "option": ("--verbose", [], r"^'--verbose' is no command; expected one of run,"),
    "option-of-a-command": ("run", ["--verbose"], r"^--verbose is no option; settings are given as mapper\.k=8"),
    "setting": ("run", ["mapper.kk=1"], r"^Could not override 'mapper\.kk': Key 'kk' not in 'Ridge"),
    "root-setting": ("run", ["moment=x"], r"^Could not override 'moment': Key 'moment' not in 'RootConfig'"),
    "added-setting": ("run", ["+pair.dtpye=float16"], r"^pair\.dtpye is no setting; expected one of source, target,"),
    "added-mapper-setting": ("run", ["+mapper.z=1"], r"^mapper\.z is no setting; expected one of k, penalty,"),
    "added-root-setting": ("run", ["+moment=x"], r"^moment is no setting; expected one of pair, mapper,"),
    "no-value": ("run", ["mapper.k"], r"^Error parsing override 'mapper\.k': missing EQUAL"),
    "type": ("run", ["mapper.k=abc"], r"mapper\.k=abc: Value 'abc' of type 'str' could not be converted to Integer"),
    "list": ("run", ["mapper.k=1,2"], r"^Ambiguous value for argument 'mapper\.k=1,2': give -m for a sweep"),
    "interpolation": ("run", ["mapper.k=${nope}"], r"^Interpolation key 'nope' not found"),
    "group-option": (
        "run",
        ["mapper=magic"],
        r"Could not find 'mapper/magic'; available: identity, joint, random, ridge, shared_basis\.$",
    ),
    "experiment": ("run", ["experiment=magic"], r"Could not find 'experiment/magic'; available: .*published_ridge"),
    "mapper": ("run", ["mapper.heads=some"], r"^mapper\.heads=some: expected one of all, matched\.$"),
    "plan": ("run", ["plan.native_tail=0"], r"^plan\.native_tail=0: the target must read at least the last"),
    "plan-of-the-pair": ("run", ["plan.native_head=9"], r"^plan\.native_head=9 makes all 4 target layers exact"),
    "plan-that-carries-nothing": ("run", ["plan.sinks=64"], r"^plan\.sinks=64 and plan\.native_tail=16 leave nothing"),
    "no-out": ("run", ["out="], r"^out is empty: give the folder of the run, out=DIR\.$"),
    "no-source": ("run", ["pair.source="], r"^pair\.source is empty: give .*pair\.source=DIR"),
    "source": ("run", ["pair.source=/nope"], r"^pair\.source=/nope: no such model folder"),
    "dtype": ("doctor", ["pair.dtype=int4"], r"^pair\.dtype=int4: expected one of float32, bfloat16, float16\.$"),
    "no-corpus": ("run", ["calibration.corpus="], r"^calibration\.corpus is empty: give a text file,"),
    "missing-corpus": ("run", ["calibration.corpus=no.txt"], r"^corpus no\.txt: no such file or folder\.$"),
    "empty-corpus": ("run", ["calibration.corpus=empty.jsonl"], r"^corpus empty\.jsonl "),
    "empty-text": ("run", ["eval.corpus=empty.txt"], r"^corpus empty\.txt holds no document\.$"),
    "too-little-text": (
        "run",
        ["calibration.tokens=1000000"],
        r"gives \d+ fit and \d+ held-out blocks of 64 tokens; calibration\.tokens=1000000 needs 15625 and 1563\. Give",
    ),
    "too-few-documents": (
        "run",
        ["eval.documents=99"],
        r"has 6 documents of 96 tokens or more; eval\.documents=99\. Ask for fewer",
    ),
    "one-document": ("run", ["eval.documents=1"], r"^eval\.documents=1: the other-document arm needs at least two"),
    "no-prompt": ("run", ["eval.prompt=96"], r"eval\.prompt=96, eval\.tokens=96: expected .*prompt < tokens"),
    "shard": ("calibrate", ["calibration.shard=3/2"], r"^calibration\.shard=3/2: expected i/n with 0 ≤ i < n"),
    "unswept-experiment": ("run", ["experiment=sweep_k"], r"^this experiment sweeps mapper\.k: give -m\.$"),
    "launcher": ("run", ["launcher=ray"], r"^launcher=ray needs a plug-in: pip install hydra-ray-launcher"),
    "logger-mode": ("run", ["logger=wandb", "logger.mode=on"], r"^logger\.mode=on: expected one of online, offline,"),
    "logger-setting": ("run", ["logger.project=x"], r"^Could not override 'logger\.project'"),
    "no-moments": ("fit", [], r"^out/calibration/moments\.safetensors: no moments there; run `kvbridge calibrate`"),
    "no-bridge": ("eval", [], r"^out/bridge: no bridge there; give bridge=DIR, or out= of a finished run\.$"),
    "unread-bridge": ("run", ["bridge=/nope"], r"^bridge=/nope is not read by this command; leave it out\.$"),
    "unread-moments": ("eval", ["moments=/nope"], r"^moments=/nope is not read by this command"),
    "short-probes": (
        "run",
        ["eval.probes.count=1", "eval.probes.lengths=[64]"],
        r"^eval\.probes\.lengths=64 is too short for 'What is the pass key",
    ),
    "long-probes": (
        "run",
        ["eval.probes.count=1", "eval.probes.lengths=[600]"],
        r"^eval\.probes\.lengths=600: this pair was made for up to 512 tokens; give fewer\.$",
    ),
    "added-probes-setting": ("run", ["+eval.probes.x=1"], r"^eval\.probes\.x is no setting; expected one of count,"),
    "negative-seed": ("run", ["eval.seed=-1"], r"^eval\.seed=-1: expected 0 or more\.$"),
    "no-bridge-to-inspect": ("inspect", [], r"^out/bridge: no bridge there; give bridge=DIR"),
    "missing-bridge": ("inspect", ["bridge=/nope"], r"^/nope: neither a bridge folder nor a hub repository"),
    "out-in-a-file": (
        "calibrate",
        ["out=empty.txt/out"],
        r"^empty\.txt/out\S* could not be written \(Not a directory\); give another folder\.$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, kvbridge: Run, tmp_path: Path) -> None:
    command, overrides, expected = REFUSED[case]
    for name in ("empty.jsonl", "empty.txt"):
        (tmp_path / name).touch()
    out = [] if any(override.startswith("out=") for override in overrides) else ["out=out"]
    said = sentence(kvbridge(command, *overrides, *out))
    assert re.search(expected, said), said
    assert left(tmp_path) == {"empty.jsonl", "empty.txt"}


def test_too_few_rows_leave_no_bridge(kvbridge: Run, tmp_path: Path) -> None:
    said = sentence(kvbridge("run", "calibration.tokens=64", "out=out"))
    assert said == (
        "60 calibration rows for 64 features per map: a ridge fit needs more rows than features "
        "(ten times as many to be trusted). Raise calibration.tokens or lower mapper.k."
    )
    assert left(tmp_path) == {"out/calibration/moments.safetensors", "out/status.json"}
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["state"], status["error"]) == ("failed", said)


@pytest.mark.parametrize(
    ("command", "given"),
    [("eval", "bridge={}/bridge"), ("fit", "moments={}/calibration"), ("run", "moments={}/calibration")],
    ids=["eval", "fit", "run"],
)
def test_refuses_what_was_made_for_another_pair(
    command: str, given: str, kvbridge: Run, finished: tuple[Path, Ran], settings: dict[str, Any], tmp_path: Path
) -> None:
    said = sentence(kvbridge(command, given.format(finished[0]), f"pair.source={settings['pair.target']}", "out=out"))
    mine = tiny_pair().identity()
    assert f"was made for another pair: source {mine['source']} where this pair has {mine['target']};" in said
    assert left(tmp_path) == set()


def test_refuses_moments_without_what_the_mapper_needs(kvbridge: Run, tmp_path: Path) -> None:
    assert kvbridge("calibrate", "mapper=identity", "out=bare", without=("mapper.k",)).code == 0
    assert "calibrate" in sentence(kvbridge("fit", "moments=bare/calibration", "out=out"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_bridge_is_not_scored(kvbridge: Run, finished: tuple[Path, Ran], tmp_path: Path) -> None:
    (tmp_path / "bridge").mkdir()
    for file in (finished[0] / "bridge").iterdir():
        (tmp_path / "bridge" / file.name).write_bytes(file.read_bytes()[:-1])
    said = sentence(kvbridge("eval", "bridge=bridge", "out=out"))
    assert said.startswith("bridge/config.json has SHA-256 ")
    assert not (tmp_path / "out").exists()


def test_an_error_of_ours_is_one_line_whatever_it_says(kvbridge: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise KVBridgeError("first line\n  second line")

    monkeypatch.setattr(commands, "doctor_command", fail)
    assert sentence(kvbridge("doctor")) == "first line second line"


def test_the_script_exits_with_2_and_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    small = settings | {"calibration.tokens": 64, "out": "out"}
    ran = in_process_of_its_own("run", *as_overrides(small), folder=tmp_path)
    assert sentence(ran).startswith("60 calibration rows for 64 features per map")
    assert ran.out == ""


@pytest.mark.slow
def test_the_script_says_nothing_when_its_reader_leaves(finished: tuple[Path, Ran], tmp_path: Path) -> None:
    done = subprocess.run(
        f"'{SCRIPT}' inspect bridge='{finished[0]}/bridge' | head -c 1",
        shell=True, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
