"""All checks and benchmarks of the Triton kernels that need a card, in one run of under eight minutes.

    python scripts/gpu_checks.py --out runs/gpu                   # tests, gate, benchmark of all pairs
    python scripts/gpu_checks.py --out runs/gpu --skip-tests --pairs 0.5B-1.5B

First the kernels' tests, on the card. Then every map of `kernel_shapes.py` with random weights: its error against the
fp32 reference on a few tokens, and only where that is small its time, beside its floor (the larger of bytes over copy
bandwidth and FLOPs over product rate, both measured in the same run) and beside the bare products of the same shapes in
torch. Writes checks.json and checks.md. Exit code 1 if a test or a gate fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_cases import LARGEST_ERROR, Prepared
from kernel_shapes import MAPS, PAIRS, Model, work

TESTS = Path(__file__).parents[1] / "tests"
# What a case may need beside its weights, in fp32: the reference works on one copy of them.
HEADROOM = 4


def milliseconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call on the card, after three that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def copy_rate(gibibytes: int = 2) -> float:
    """Bytes read and written per second by a plain copy."""
    given = torch.empty(gibibytes << 29, dtype=torch.bfloat16, device="cuda")
    made = torch.empty_like(given)
    return 2 * given.nbytes / milliseconds(lambda: made.copy_(given)) * 1e3


def product_rate(size: int = 8192) -> float:
    """Operations per second of a plain bf16 product."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) * 1e3


def run_tests(seconds: float) -> dict[str, Any]:
    """The kernels' tests on the card, those marked `gpu` and `slow` among them."""
    command = [Path(sysconfig.get_path("scripts"), "pytest"), "-q", "-m", "not real_pair", "-p", "no:cacheprovider"]
    files = [TESTS / "test_triton.py", TESTS / "test_launching.py", TESTS / "test_triton_gpu.py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        run = subprocess.run(
            [*command, *files], capture_output=True, text=True, env=environment, cwd=TESTS.parent, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "summary": f"stopped after {seconds:.0f} s"}
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    return {"passed": run.returncode == 0, "summary": lines[-1] if lines else run.stderr[-500:], "output": run.stdout}


def measure(name: str, pair: tuple[Model, Model], tokens: int, copied: float, products: float) -> dict[str, Any]:
    """Gate and time one map; a map whose error is too large gets no time."""
    found: dict[str, Any] = {"map": name, "pair": f"{pair[0].name} → {pair[1].name}", "tokens": tokens}
    need = HEADROOM * work(name, pair, 0).bytes_moved + work(name, pair, tokens).bytes_moved
    free, _ = torch.cuda.mem_get_info()
    if need > free:
        return found | {"skipped": f"needs {need / 1e9:.0f} GB of the {free / 1e9:.0f} GB that are free"}
    torch.manual_seed(0)
    prepared = Prepared.make(name, pair, torch.device("cuda"), torch.bfloat16)
    found["error"] = prepared.error(tokens=33)
    if not found["error"] < LARGEST_ERROR:
        return found | {"skipped": f"error {found['error']:.1%}, at most {LARGEST_ERROR:.1%} is right"}
    cost = work(name, pair, tokens)
    call, plain = prepared.call(tokens), prepared.products(tokens)
    found["ms"], found["torch_ms"] = milliseconds(call), milliseconds(plain)
    found["floor_ms"] = 1e3 * max(cost.bytes_moved / copied, cost.flops / products)
    found["share_of_floor"] = found["floor_ms"] / found["ms"]
    return found | {"flops": cost.flops, "bytes": cost.bytes_moved, "share_of_prefill": cost.share}


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """The results as a table under the card's name."""
    yield f"# {results['device']}, torch {results['torch']}, triton {results['triton']}"
    yield ""
    yield f"Tests: {results['tests']['summary'] if results['tests'] else 'not run'}. "
    yield (
        f"Copies {results['copy_rate'] / 1e12:.2f} TB/s, bf16 products {results['product_rate'] / 1e12:.0f} TFLOP/s, "
        f"both measured in this run; {results['command']}"
    )
    yield ""
    yield "| pair | map | tokens | error | ms | floor ms | share of floor | bare torch products ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in results["cases"]:
        start = f"| {case['pair']} | {case['map']} | {case['tokens']} | "
        if "ms" not in case:
            yield f"{start}{case['skipped']} | | | | |"
            continue
        numbers = (f"{case['error']:.2%}", f"{case['ms']:.3f}", f"{case['floor_ms']:.3f}")
        yield f"{start}{' | '.join(numbers)} | {case['share_of_floor']:.0%} | {case['torch_ms']:.3f} |"


def checks(options: argparse.Namespace) -> dict[str, Any]:
    import triton

    end = time.monotonic() + options.seconds
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"`python scripts/gpu_checks.py {' '.join(sys.argv[1:])}`",
        "tests": None if options.skip_tests else run_tests(options.seconds / 2),
        "copy_rate": copy_rate(),
        "product_rate": product_rate(),
        "cases": [],
    }
    for pair in options.pairs:
        for name in MAPS:
            for tokens in options.tokens:
                if time.monotonic() > end - 15:
                    described = f"{PAIRS[pair][0].name} → {PAIRS[pair][1].name}"
                    case: dict[str, Any] = {"map": name, "pair": described, "tokens": tokens, "skipped": "out of time"}
                else:
                    case = measure(name, PAIRS[pair], tokens, results["copy_rate"], results["product_rate"])
                    torch.cuda.empty_cache()
                results["cases"].append(case)
                print(json.dumps(case), flush=True)
    return results


def failed(results: dict[str, Any]) -> bool:
    """Whether a test or a gate said no."""
    wrong = [case for case in results["cases"] if not case.get("error", 0.0) < LARGEST_ERROR]
    return bool(wrong) or bool(results["tests"] and not results["tests"]["passed"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--seconds", type=float, default=450, help="time for everything")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is there; these checks need one")
    results = checks(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checks.json").write_text(json.dumps(results, indent=1))
    (options.out / "checks.md").write_text("\n".join(markdown(results)) + "\n")
    print((options.out / "checks.md").read_text())
    sys.exit(failed(results))
