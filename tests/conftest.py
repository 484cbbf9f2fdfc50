"""Offline, seeded, and on the installed package."""

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="disabled",
    TOKENIZERS_PARALLELISM="false",
    HF_DATASETS_CACHE=tempfile.mkdtemp(prefix="kvbridge-datasets-"),
    # A Python that a test starts from the checkout must not import the checkout's folders.
    PYTHONSAFEPATH="1",
    # Triton 3.9 warns where it is not set.
    TRITON_DEFAULT_FP_FUSION="1",
)

import datasets
import pytest
import torch

from command_line import SIZES, Ran, Run, as_overrides

# Triton reads it when a kernel's module is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

CHECKOUT = Path(__file__).parents[1]


def pytest_configure() -> None:
    spec = find_spec("kvbridge")
    if spec is None or spec.origin is None or Path(spec.origin).parent == CHECKOUT / "kvbridge":
        raise pytest.UsageError(
            f"the tests run on an installed wheel of kvbridge, found {spec and spec.origin}: "
            "use scripts/test, which builds and installs it (not `python -m pytest`, no editable install)"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to is NaN."""
    from tiny_maps import poison

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(scope="module")
def own_dataset_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What datasets keeps of the texts of one module, out of the way of all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny pair with a joint map, to be left as it is."""
    from tiny_residual import fit_tiny

    return fit_tiny(tmp_path_factory.mktemp("residual"))


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Overrides that make every command work, by name."""
    from tiny_pair import save_pair, tiny_pair, write_corpus

    folder = tmp_path_factory.mktemp("inputs")
    source, target = save_pair(tiny_pair(), folder)
    return SIZES | {
        "pair.source": source,
        "pair.target": target,
        "calibration.corpus": write_corpus(folder / "calibration.jsonl.gz"),
        "eval.corpus": write_corpus(folder / "eval.jsonl", documents=6, seed=1),
    }


@pytest.fixture
def kvbridge(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    """Run a command in this process, in an empty folder; its overrides come on top of those that work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    # Imported here, after the hook that checks shapes is in place.
    from kvbridge import cli

    def run(command: str, *overrides: str, without: tuple[str, ...] = ()) -> Ran:
        changed = {override.split("=")[0].lstrip("+") for override in overrides} | set(without)
        kept = as_overrides({name: value for name, value in settings.items() if name not in changed})
        monkeypatch.setattr(sys, "argv", ["kvbridge", command, *kept, *overrides])
        capsys.readouterr()
        try:
            code: Any = cli.main()
        except SystemExit as stop:
            code = stop.code
        return Ran.of(code, *capsys.readouterr())

    return run
