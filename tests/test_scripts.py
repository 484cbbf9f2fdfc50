"""The scripts that train and score maps: what they refuse, in one sentence, and what they leave."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvbridge.bridge import Bridge
from kvbridge.calibration import MOMENTS, differing_settings
from kvbridge.cli.scripts import run_script
from kvbridge.layout import BridgeMap
from tiny_pair import save_pair
from tiny_residual import Fitted

FOLDER = Path(__file__).parents[1] / "scripts"
STEPS = (
    "rank=4", "steps=2", "batch=2", "accumulate=1", "suffixes=2", "suffix=8", "queries=12", "warmup=1", "documents=4",
    "dev_documents=2", "evaluate_every=2", "learning_rate=3e-3", "seed=0",
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """What a script left: exit code, standard output and standard error without progress bars."""

    code: Any
    out: str
    err: list[str]


Run = Callable[..., Ran]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script in this process."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, *arguments: str) -> Ran:
        module: types.ModuleType = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"{FOLDER}/{name}.py", *arguments])
        capsys.readouterr()
        code: Any = 0
        try:
            run_script(module.main)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return Ran(code, out, [line for line in err.splitlines() if ": error: " in line])

    return run


@pytest.fixture(scope="module")
def places(fitted: Fitted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny pair, a bridge of one map and one of two, and moments: the maps' own and others."""
    folder = tmp_path_factory.mktemp("scripts")
    source, target = save_pair(fitted.pair, folder)
    identity = fitted.moments.info["identity"]
    joint = BridgeMap(fitted.forms, {"name": "joint"}, {})
    described: dict[str, Any] = {"identity": identity, "rows": 2048}
    bridge = Bridge({"joint": joint}, fitted.pair.identity(), fitted.pair.describe(), described)
    bridge.save_pretrained(folder / "one")
    bridge.with_map("other", joint).save_pretrained(folder / "two")
    replace(bridge, calibration={}).save_pretrained(folder / "silent")
    others = fitted.moments.clone()
    others.info["identity"] = identity | {"calibration.skip": 300, "moment blocks": []}
    others.save(folder / "others" / MOMENTS)
    named = ("one", "two", "silent", "others")
    moments = fitted.store.folder.parent
    return {"source": source, "target": target, "moments": moments} | {name: folder / name for name in named}


@pytest.fixture
def train(script: Run, places: dict[str, Path], fitted: Fitted, tmp_path: Path) -> Run:
    """Run real_residual.py on the bridge of one map, unless `changed` names other places."""

    def run(*settings: str, **changed: str) -> Ran:
        given = {"bridge": "one", "moments": "moments"} | changed
        named = {name: places[place] for name, place in given.items()}
        named |= {name: places[name] for name in ("source", "target")}
        named |= {"corpus": Path(fitted.calibration.corpus or ""), "out": tmp_path / "out"}
        options = [text for name, place in named.items() for text in (f"--{name}", str(place))]
        return script("real_residual", *options, "--dtype", "float32", "--storage", "float32", *STEPS, *settings)

    return run


def test_a_branch_is_trained_and_stored(train: Run, places: dict[str, Path], tmp_path: Path) -> None:
    ran = train("kind=gelu", "steps=4")
    assert (ran.code, ran.err) == (0, [])
    trained = Bridge.from_pretrained(tmp_path / "out" / "bridge").map("joint")
    assert [form.name for form in trained.forms][-1] == "residual_branch"
    assert trained.mapper["residual"]["kind"] == "gelu"


def test_a_branch_that_gains_nothing_is_not_stored(train: Run, tmp_path: Path) -> None:
    ran = train("kind=gelu", "learning_rate=1e-30")
    assert (ran.code, ran.err) == (0, [])
    assert ran.out.splitlines()[-1] == "training found nothing that beats the map as it was; no bridge is written"
    assert not (tmp_path / "out" / "bridge").exists()


@pytest.mark.parametrize(
    ("settings", "changed", "said"),
    [
        ((), {}, "kind=none: nothing is trained; give kind=linear or kind=quadratic or kind=gelu."),
        (("kind=gelu", "lost=kl"), {}, "lost: mapper.residual has no such setting; expected one of kind, rank, loss,"),
        (("kind=gelu", "loss=foo"), {}, "mapper.residual.loss=foo: expected one of mse, attention, on_policy, kl."),
        (("kind=gelu", "rank=wide"), {}, "Value 'wide' of type 'str' could not be converted to Integer"),
        (("kind=gelu",), {"moments": "others"}, "calibration.skip differ (calibration.skip is not set, and there 300)"),
        (("kind=gelu",), {"bridge": "silent"}, "was fitted on another calibration than that of"),
        (("kind=gelu",), {"bridge": "two"}, "the bridge has the maps joint, other; say which one"),
        (("kind=gelu",), {"moments": "source"}, "no moments there"),
    ],
    ids=["kind", "name", "loss", "type", "moments", "silent-bridge", "two-maps", "no-moments"],
)
def test_training_refuses(
    train: Run, tmp_path: Path, settings: tuple[str, ...], changed: dict[str, str], said: str
) -> None:
    ran = train(*settings, **changed)
    assert (ran.code, len(ran.err)) == (2, 1)
    assert ran.err[0].startswith("real_residual.py: error: ")
    assert said in ran.err[0], ran.err[0]
    assert not (tmp_path / "out").exists()


def test_the_table_of_branches_refuses_moments_of_another_calibration(
    script: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    named = ("--bridge", str(places["one"]), "--moments", str(places["others"]), "--out", str(tmp_path / "out"))
    ran = script("residual_table", *named)
    assert (ran.code, len(ran.err)) == (2, 1)
    assert "give the moments that it was fitted on." in ran.err[0]
    assert not (tmp_path / "out").exists()


def test_moment_blocks_alone_make_no_other_calibration() -> None:
    one = {"calibration.seed": 0, "moment blocks": ["a×b"]}
    assert differing_settings(one, one | {"moment blocks": []}) == []
    assert differing_settings(one, {"calibration.seed": 1, "pair.source": "x"}) == ["calibration.seed", "pair.source"]


@pytest.fixture
def table(script: Run, places: dict[str, Path], fitted: Fitted, tmp_path: Path) -> Run:
    """Run closed_form_table.py on two short documents."""
    named = {name: places[name] for name in ("source", "target")}
    named |= {"corpus": Path(fitted.calibration.corpus or ""), "out": tmp_path / "out"}
    options = [text for name, place in named.items() for text in (f"--{name}", str(place))]
    sizes = ("--dtype", "float32", "--documents", "2", "--tokens", "96", "--prompt", "80", "--rollout", "2")
    return lambda *given: script("closed_form_table", *options, *sizes, *given)


def test_the_table_takes_one_of_several_maps(table: Run, places: dict[str, Path], tmp_path: Path) -> None:
    ran = table("--map", f"a={places['two']}:other", "--map", f"b={places['one']}", "--budget", "0.01")
    assert (ran.code, ran.err) == (0, [])
    assert "a: a budget of 1.0% buys no attended tokens; there is no row with them" in ran.out
    rows = [line.split(" | ")[0] for line in (tmp_path / "out" / "table.md").read_text().splitlines()[2:]]
    scored = [f"| {name}, {what}" for name in "ab" for what in ("mapped only", "another document's cache")]
    assert sorted(row for row in rows if ", " in row) == sorted(scored)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--map", "one"), "--map one: expected NAME=FOLDER or NAME=FOLDER:MAP, and another NAME for every map."),
        (("--map", "a=x", "--map", "a=y"), "--map a=y: expected NAME=FOLDER"),
        (("--map", "a={two}"), "say which map, as in a={two}:joint|other."),
        (("--map", "a={two}:third"), "the bridge has no map 'third'; it has joint, other."),
        (("--map", "a={one}", "--part", "2/2"), "--part 2/2: expected i/n with 0 ≤ i < n, such as 0/2."),
        (("--map", "a={one}", "--part", "half"), "--part half: expected i/n"),
    ],
    ids=["no-name", "twice", "several-maps", "no-such-map", "part", "no-part"],
)
def test_the_table_refuses(
    table: Run, places: dict[str, Path], tmp_path: Path, given: tuple[str, ...], said: str
) -> None:
    named = {name: str(place) for name, place in places.items()}
    ran = table(*(text.format(**named) for text in given))
    assert (ran.code, len(ran.err)) == (2, 1)
    assert said.format(**named) in ran.err[0], ran.err[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "path", [path for path in sorted(FOLDER.glob("*.py")) if "parse_args()" in path.read_text()], ids=lambda p: p.stem
)
def test_scripts_that_load_something_of_a_user_end_in_a_sentence(path: Path) -> None:
    text = path.read_text()
    loads = [name for name in ("load_pair(options", "Bridge.from_pretrained(", "load_results(") if name in text]
    assert not loads or "run_script(main)" in text.partition('if __name__ == "__main__":')[2]
