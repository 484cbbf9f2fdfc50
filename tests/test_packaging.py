"""The installed wheel holds every file of the rooms, as it is in the checkout, and nothing generic."""

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

import kvbridge

CHECKOUT = Path(__file__).parents[1]
FOLDERS = {"kvbridge": "kvbridge"} | {
    room: f"kvbridge/{room}" for room in ("calibration", "cascade", "configs", "eval", "kernels", "mappers")
}
WHEEL = metadata.distribution("kvbridge")


def is_source(path: PurePosixPath | Path) -> bool:
    return not any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def shipped() -> set[PurePosixPath]:
    return {PurePosixPath(file) for file in WHEEL.files or [] if "__pycache__" not in file.parts}


def in_checkout() -> dict[PurePosixPath, Path]:
    """Where each file of a room belongs in the wheel, and where it lies now."""
    found = {}
    for folder, target in FOLDERS.items():
        for path in (CHECKOUT / folder).rglob("*"):
            inside = path.relative_to(CHECKOUT / folder)
            if path.is_file() and is_source(inside):
                found[PurePosixPath(target, inside)] = path
    return found


def test_every_file_of_a_room_is_shipped() -> None:
    missing = sorted(str(file) for file in in_checkout().keys() - shipped())
    assert missing == [], "name it in pyproject's package-data, or give its folder an __init__.py"


def test_the_wheel_is_that_of_this_checkout() -> None:
    here = in_checkout()
    gone = sorted(str(file) for file in shipped() - here.keys() if file.parts[0] == "kvbridge")
    changed = [str(f) for f, path in here.items() if f in shipped() and differs(f, path)]
    assert gone + changed == [], "the installed wheel is another one: run scripts/test"


def differs(file: PurePosixPath, path: Path) -> bool:
    return Path(str(WHEEL.locate_file(file))).read_bytes() != path.read_bytes()


def test_rooms_configs_and_the_type_marker_are_seen() -> None:
    here = in_checkout()
    assert {PurePosixPath(target, "__init__.py") for target in FOLDERS.values()} <= here.keys()
    assert PurePosixPath("kvbridge/py.typed") in here


def test_nothing_else_is_installed_at_top_level() -> None:
    top = {file.parts[0] for file in shipped() if file.parts[0] != ".."}
    assert top == {"kvbridge", f"kvbridge-{WHEEL.version}.dist-info"}


@pytest.mark.parametrize("name", [*FOLDERS, "scripts"])
def test_the_checkout_shadows_no_package(name: str) -> None:
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    assert str(CHECKOUT / name) not in places


def test_one_version() -> None:
    citation = re.search(r"^version: (.+)$", (CHECKOUT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation
    assert kvbridge.__version__ == WHEEL.version == citation[1]
