"""Offline, seeded, and on the installed package."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="disabled",
    TOKENIZERS_PARALLELISM="false",
    HF_DATASETS_CACHE=tempfile.mkdtemp(prefix="kvbridge-datasets-"),
    # A Python that a test starts from the checkout must not import the checkout's folders.
    PYTHONSAFEPATH="1",
)

import pytest
import torch

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
