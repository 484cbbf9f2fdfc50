"""Every Python block of the README and the docs runs, in order, on a tiny pair; every named file and command exists."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge.calibration import CalibrationMoments, Moments
from kvbridge.calibration.moments import PARTS
from kvbridge.cli import COMMANDS, FOLDER_COMMANDS, PASSED_ON
from kvbridge.forms import KINDS
from kvbridge.pair import ModelPair, load_pair
from kvbridge.plan import HandoffPlan
from tiny_bridge import random_bridge, with_open_gate
from tiny_pair import save_pair, tiny_pair

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXAMPLE = "adding_a_mapper.md"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelPair, dict[str, str]]:
    """A tiny pair and bridge on disk, and what the docs' placeholders stand for."""
    folder = tmp_path_factory.mktemp("docs")
    pair = tiny_pair()
    source, target = save_pair(pair, folder)
    with_open_gate(random_bridge(pair), HandoffPlan()).save_pretrained(folder / "bridge")
    random_bridge(load_pair("embedded")).save_pretrained(folder / "first")
    named = {"path/to/source": source, "path/to/target": target}
    named |= {"path/to/bridge": folder / "bridge", "runs/first/bridge": folder / "first"}
    return pair, {placeholder: str(place) for placeholder, place in named.items()}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text()) and page.name != EXAMPLE], ids=lambda p: p.name
)
def test_blocks_run(page: Path, places: tuple[ModelPair, dict[str, str]]) -> None:
    pair, named = places
    code = "\n".join(BLOCK.findall(page.read_text()))
    for placeholder, place in named.items():
        code = code.replace(f'"{placeholder}"', repr(place))
    code = re.sub(r"load_pair\((.*?)\)", r'load_pair(\1, dtype="float32")', code)
    names: dict[str, Any] = {
        "prompt": "amber basil cedar " * 8,
        "input_ids": torch.randint(2, len(pair.tokenizer), (1, 48)),
    }
    exec(compile(code, str(page), "exec"), names)
    loaded: Any = names["pair"]
    assert isinstance(loaded, ModelPair)
    if "handoff" in names:
        assert names["handoff"].logits.shape == (1, loaded.target.model.config.vocab_size)


def _moments(pair: ModelPair) -> CalibrationMoments:
    widths = {
        f"{role}.{kind}": model.geometry.width
        for role, model in (("source", pair.source), ("target", pair.target))
        for kind in KINDS
    }
    sets = {(split, part): Moments.zeros(widths, ()) for split in ("fit", "held_out") for part in PARTS}
    sets["fit", "rest"].add({name: torch.randn(32, width) for name, width in widths.items()})
    return CalibrationMoments(sets)


def test_the_example_mapper_fits(places: tuple[ModelPair, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    pair, _ = places
    (code,) = BLOCK.findall((ROOT / "docs" / EXAMPLE).read_text())
    module = types.ModuleType("mean_mapper")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, EXAMPLE, "exec"), module.__dict__)
    moments = _moments(pair)
    mapper = module.Mean()
    assert dataclasses.is_dataclass(mapper)
    fitted = mapper.fit(moments, pair.source.geometry, pair.target.geometry)
    expected = moments.sets["fit", "rest"].mean["target.keys"].float()
    assert torch.equal(fitted.forms[0].bias.flatten(), expected)
    assert not fitted.forms[0].weight.any()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:scripts|tests|eval|kvbridge|mappers|docs)/[\w/.]+\.(?:py|md))`", text):
        if name != "mappers/mean.py":
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    shown = "\n".join(re.findall(r"```(?:bash)?\n(.*?)```", page.read_text(), re.DOTALL))
    named = set(re.findall(r"kvbridge ([a-z][a-z-]*)\b", shown))
    assert named <= {*COMMANDS, *FOLDER_COMMANDS, *PASSED_ON}
