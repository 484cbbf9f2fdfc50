"""The house: imports between rooms only go down, files and functions stay short, `--help` stays light."""

import ast
import importlib
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbridge

CORE = "kvbridge"
MAY_IMPORT = {
    "configs": (),
    CORE: (),
    "kernels": (CORE,),
    "calibration": (CORE,),
    "mappers": (CORE, "calibration", "kernels"),
    "cascade": (CORE, "kernels"),
    "eval": (CORE, "kernels", "calibration", "mappers", "cascade"),
}
ROOMS = sorted(MAY_IMPORT.keys() - {CORE})
BUDGET = {"file median": 130, "file p90": 300, "function p90": 45}
INSTALLED = Path(kvbridge.__path__[0])


def modules(package: Path) -> dict[str, Path]:
    """Dotted name and file of every module, refusing a tree that lacks a room."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join((CORE, *parts))] = path
    missing = [room for room in ROOMS if f"{CORE}.{room}.__init__" not in found]
    if missing:
        raise LookupError(f"{package} lacks the rooms {missing}: build and install the wheel with scripts/test")
    return found


def room_of(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else CORE


def absolute(target: str, level: int, package: str) -> str:
    """Resolve an import with `level` leading dots made inside `package`."""
    if level == 0:
        return target
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - level + 1], target]).rstrip(".")


def targets(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            return [f"{absolute(module or '', level, package)}.{alias.name}" for alias in names]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            bare = name.lstrip(".")
            return [absolute(bare, len(name) - len(bare), package)]
    return []


def imports(module: str, path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, target and whether it runs only when a function is called, for every import of kvbridge."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {inner for function in functions for inner in ast.walk(function)}
    package = module.rpartition(".")[0]
    for node in ast.walk(tree):
        for target in targets(node, package):
            if target.split(".")[0] == CORE:
                yield node.lineno, target, node in lazy


def violations(package: Path) -> list[str]:
    bad = []
    for module, path in modules(package).items():
        room = room_of(module)
        for line, target, lazy in imports(module, path):
            allowed = room_of(target) in (room, *MAY_IMPORT[room])
            reaches_in = lazy and f"{module}.".startswith(f"{CORE}.cli.")
            if not (allowed or reaches_in):
                bad.append(f"{module}:{line} imports {target}")
    return bad


def sizes(package: Path) -> dict[str, float]:
    files, functions = [], []
    for path in modules(package).values():
        source = path.read_text()
        if path.name != "__init__.py":
            files.append(len(source.splitlines()))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(node.end_lineno - node.lineno + 1)
    return {
        "file median": statistics.median(files),
        "file p90": statistics.quantiles(files, n=10, method="inclusive")[-1],
        "function p90": statistics.quantiles(functions, n=10, method="inclusive")[-1],
    }


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A tree of seven empty rooms with one deeper package in `mappers`."""
    for folder in ("", "mappers/deep", *ROOMS):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_imports_between_rooms_only_go_down() -> None:
    assert violations(INSTALLED) == []


def test_files_and_functions_stay_short() -> None:
    measured = sizes(INSTALLED)
    assert {name: size for name, size in measured.items() if size > BUDGET[name]} == {}


@pytest.mark.parametrize(
    ("file", "source", "bad"),
    [
        ("geometry.py", "import kvbridge.kernels", True),
        ("geometry.py", "from kvbridge import kernels", True),
        ("geometry.py", "from . import kernels", True),
        ("geometry.py", "from .kernels import dispatch", True),
        ("__init__.py", "from .mappers import ridge", True),
        ("geometry.py", "def f():\n    from kvbridge import eval", True),
        ("geometry.py", "import importlib\nimportlib.import_module('.eval', __package__)", True),
        ("geometry.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvbridge.eval", True),
        ("geometry.py", "from kvbridge.rotary import strip", False),
        ("cli.py", "from kvbridge.eval import report", True),
        ("cli.py", "def run():\n    from kvbridge.eval import report", False),
        ("cli/run.py", "def run():\n    from kvbridge.eval import report", False),
        ("client.py", "def run():\n    from kvbridge.eval import report", True),
        ("kernels/fast.py", "from kvbridge.mappers import ridge", True),
        ("kernels/fast.py", "from ..forms import SlotAffine", False),
        ("kernels/fast.py", "import kernels", False),
        ("calibration/stream.py", "import kvbridge.kernels.dispatch as d", True),
        ("mappers/ridge.py", "from ..eval import arms", True),
        ("mappers/ridge.py", "from ..calibration import moments", False),
        ("mappers/deep/ridge.py", "from ...cascade import runtime", True),
        ("mappers/deep/ridge.py", "from ..shared import solve", False),
        ("mappers/deep/__init__.py", "from ...cascade import runtime", True),
        ("cascade/runtime.py", "from kvbridge.mappers import ridge", True),
        ("cascade/runtime.py", "from kvbridge.kernels import run", False),
        ("eval/arms.py", "from kvbridge import mappers, cascade, calibration, kernels", False),
        ("eval/arms.py", "import kvbridge.configs", True),
        ("configs/schema.py", "import kvbridge.plan", True),
    ],
)
def test_the_import_check_bites(house: Path, file: str, source: str, bad: bool) -> None:
    path = house / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert len(violations(house)) == bad


def test_a_house_without_a_room_is_refused(house: Path) -> None:
    (house / "kernels/__init__.py").unlink()
    with pytest.raises(LookupError, match="kernels"):
        violations(house)


def test_the_size_check_bites(house: Path) -> None:
    body = "    pass\n" * 50
    (house / "long.py").write_text("".join(f"def f{i}():\n{body}" for i in range(7)))
    (house / "eval/short.py").write_text("x = 1\n")
    assert sizes(house) == {"file median": 179, "file p90": pytest.approx(321.4), "function p90": 51}


@pytest.mark.parametrize("name", [CORE, *(f"{CORE}.{room}" for room in ROOMS)])
def test_shapes_are_checked_in_every_room(name: str) -> None:
    loader = importlib.import_module(name).__loader__
    assert type(loader).__module__.startswith("jaxtyping")


def test_help_loads_no_model_library() -> None:
    command = Path(sysconfig.get_path("scripts"), "kvbridge")
    run = subprocess.run([sys.executable, "-X", "importtime", command, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "kvbridge.cli" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "accelerate", "matplotlib", "lm_eval"})
