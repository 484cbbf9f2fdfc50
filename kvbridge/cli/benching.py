"""The benchmark command: times of a bridge's hand-off beside the prefill that it replaces."""

from __future__ import annotations

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from kvbridge.bridge import Bridge
from kvbridge.cli.planning import chosen, require_one_process
from kvbridge.cli.settings import Settings
from kvbridge.processes import alone


def bench_command(config: DictConfig) -> None:
    """Time a hand-off, once it is known to be right, and show what quality the same map and plan reach."""
    settings = Settings.of(config)
    settings.refuse("moments")
    require_one_process("bench")
    location = settings.bridge_location()
    with alone(settings.out, main=True):
        _bench(settings, location)


def _bench(settings: Settings, location: str) -> None:
    from kvbridge.eval.bench import clear_partial, run_bench
    from kvbridge.eval.bench_report import bench_context, write_bench
    from kvbridge.eval.results import describe_run
    from kvbridge.eval.suite import Task

    pair = settings.pair.load()
    bridge = Bridge.from_pretrained(location, pair=pair)
    choice = chosen(settings, pair, bridge)
    folder = settings.out / "bench"
    task = Task.of(pair, choice.plan, settings.eval, folder)
    results = run_bench(task, bridge, choice.map, settings.bench)
    settings.plain.update(bridge=location, bridge_fingerprint=bridge.fingerprint())
    results["run"] = describe_run(pair, settings.plain, {}) | {"text": task.corpus.fingerprint}
    written = write_bench(folder, results)
    clear_partial(folder)
    context, console = bench_context(results), Console(width=160)
    for columns, rows in (("columns", "rows"), ("step_columns", "step_rows")):
        table = Table(*context[columns])
        for row in context[rows]:
            table.add_row(*row)
        console.print(table)
    for sentence in ("caption", "gate", "memory"):
        console.print(context[sentence], markup=False)
    print(f"report: {written[1]}")
