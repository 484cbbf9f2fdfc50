"""One self-contained HTML page and its Markdown twin, from `results.json` alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from kvbridge.disk import write_whole
from kvbridge.dotted import flatten, trains_branch
from kvbridge.errors import UsageError
from kvbridge.eval import figures, probe_figures
from kvbridge.eval.course_report import length_section, turn_section
from kvbridge.eval.fidelity import METRIC_NAMES
from kvbridge.eval.results import SCHEMA
from kvbridge.eval.verdict import percent, seconds, verdict
from kvbridge.pair import EMBEDDED

# What every reader of results relies on; whatever else is wrong is found while a page is written.
PLACES = (
    "run.settings", "run.versions", "run.seeds", "pair.source", "pair.target", "mapper.name", "plan", "calibration",
    "arms.native", "arms.mapped", "documents", "by_position.mapped", "reconstruction", "selected_layers", "samples",
    "cost.target_prefill_flops_share",
)  # fmt: skip
BENCHMARK_COLUMNS = (
    "task", "questions", "chance", "source", "mapped", "native", "gap recovered", "retention",
    "p (source)", "p (native)", "carried",
)  # fmt: skip


def load_results(folder: Path) -> dict[str, Any]:
    """Read `results.json` of a finished run.

    Raises:
        UsageError: there is none, it is damaged, or its schema is another one.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no results.json; give the out= folder of a finished `kvbridge run` or `eval`."
        )
    try:
        results = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is damaged ({error}); evaluate again.") from error
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        found = results.get("schema") if isinstance(results, dict) else None
        raise UsageError(f"{path} has schema {found}, expected {SCHEMA}; evaluate again with this kvbridge.")
    for place in PLACES:
        found: Any = results
        for name in place.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise UsageError(f"{path} is damaged (it has no {place}); delete it and evaluate again.")
    return results


def metric_cell(metric: str, value: dict[str, Any]) -> tuple[str, str]:
    """Mean and 95 % interval of one metric, as text."""
    if value["mean"] is None:
        return "—", ""
    if metric in ("gap_recovered", "top1", "acceptance"):
        digits = 0 if metric == "gap_recovered" else 1
        low, high = (percent(end, digits) for end in value["ci95"])
        return percent(value["mean"], digits), f"{low} … {high}"
    # Adding zero turns a rounded −0 into 0.
    mean, low, high = (round(number, 3) + 0.0 for number in (value["mean"], *value["ci95"]))
    return f"{mean:.3f}", f"{low:.3f} … {high:.3f}"


def arms_table(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the arms table, the map under test first after the reference."""
    order = [arm for arm in figures.ARM_NAMES if arm in results["arms"]]
    return [
        {
            "arm": arm,
            "name": figures.ARM_NAMES[arm],
            "cells": [metric_cell(metric, results["arms"][arm].get(metric, {"mean": None})) for metric in METRIC_NAMES],
        }
        for arm in order
    ]


def _points(interval: dict[str, Any]) -> str:
    """A difference of accuracies in percentage points."""
    mean, low, high = (f"{100 * value:+.1f}" for value in (interval["mean"], *interval["ci95"]))
    return f"{mean} points (95 % interval {low} … {high})"


def probe_section(results: dict[str, Any]) -> dict[str, Any] | None:
    """What the section on the probes shows, or nothing where none were asked."""
    probes = results.get("probes")
    if not probes:
        return None
    scores = {"choice": "forced choice", "generated": "generated"}

    def row(arms: dict[str, Any], score: str) -> list[tuple[str, str]]:
        return [metric_cell("top1", found[score]) for found in arms.values()]

    groups = [*((entry["task"], entry["arms"]) for entry in probes["tasks"]), ("all tasks", probes["arms"])]
    names = figures.ARM_NAMES
    differences = [
        f"{names[entry['arm']]} minus {names[entry['against']]}, {name}: {_points(entry[score])}"
        for entry in probes["differences"]
        for score, name in scores.items()
    ]
    cells = [f"{entry['task']}, {entry['length']} tokens, depth {entry['depth']:g}" for entry in probes["cells"]]
    return {
        "figure": probe_figures.accuracy_by_place(probes),
        "arms": [names[arm] for arm in probes["arms"]],
        "rows": [(task, name, row(arms, score)) for task, arms in groups for score, name in scores.items()],
        "cells": [(name, row(entry["arms"], "choice")) for name, entry in zip(cells, probes["cells"], strict=True)],
        "differences": differences,
        "count": len(probes["records"]),
        "language": probes["settings"]["language"],
    }


def _word(name: str, value: Any) -> str:
    """One override, quoted for Hydra where its grammar would read more into the value, and for the shell."""
    text = "null" if value is None else str(value)
    if isinstance(value, str) and re.search(r"[,\[\]{}()'\"\\]|^\s|\s$", text):
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        text = f"'{escaped}'"
    return shlex.quote(f"{name}={text}")


def _overrides(prefix: str, settings: dict[str, Any]) -> list[str]:
    """Overrides that give these settings; what was left empty is left out, and what nothing reads."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            # What is not asked for is said to be so: another default must not ask for it.
            words += _overrides(f"{prefix}.{name}", value) if value.get("count", 1) else [f"{prefix}.{name}.count=0"]
        elif isinstance(value, list):
            if value:
                words.append(shlex.quote(f"{prefix}.{name}=[{','.join(map(str, value))}]"))
        elif value is not None and value != "":
            words.append(_word(f"{prefix}.{name}", value))
        elif (prefix, name) == ("plan", "native_head"):
            words.append("plan.native_head=null")
    return words


def cost_table(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the cost section."""
    cost = results["cost"]

    def megabytes(name: str) -> str:
        return f"{cost[name] / 1e6:.1f} MB" if cost.get(name) else "—"

    calibration = cost.get("calibration_seconds")
    return [
        ("share of the target's prefill FLOPs", percent(cost["target_prefill_flops_share"], 1)),
        ("native time to first token", seconds(cost["native_ttft_s"])),
        ("warm time to first token (source cache exists)", seconds(cost["warm_ttft_s"])),
        ("cold time to first token (source prefill counted)", seconds(cost["cold_ttft_s"])),
        ("mapping", f"{cost['mapping_tokens_per_s']:.0f} tokens/s" if cost["mapping_tokens_per_s"] else "—"),
        ("bridge on disk", megabytes("artifact_bytes")),
        ("peak memory of the process", megabytes("peak_memory_bytes")),
        ("calibration", f"{calibration / 60:.1f} min" if calibration else "—"),
    ]


def benchmark_table(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the benchmark table: scores of all three arms, and what is computed from them."""
    rows = []
    for name, task in (results.get("retention") or {}).items():
        shares = [task[share] for share in ("gap_recovered", "retention")]
        cells = [metric_cell("acceptance", task["scores"][arm]) for arm in ("source", "mapped", "native")]
        rows.append(
            {
                "task": name,
                "n": task["n"],
                "chance": percent(task["chance"], 1),
                "cells": cells + [metric_cell("gap_recovered", share) for share in shares],
                "p": [f"{task['mcnemar'][other]['p']:.2g}" for other in ("source", "native")],
                "carried": percent(task["carried_share"]),
                "reasons": list(dict.fromkeys(share["reason"] for share in shares if share["mean"] is None)),
            }
        )
    return rows


def reproduce(results: dict[str, Any]) -> str:
    """The command that repeats the run, with every setting that it read."""
    settings = results["run"]["settings"]
    local = [] if settings["pair"]["source"] == EMBEDDED else ["pair=local"]
    words = ["kvbridge run", *local]
    groups = ["pair", "plan", "calibration", "eval"]
    if settings.get("bridge"):
        words = ["kvbridge eval", *local, _word("bridge", settings["bridge"])]
        groups.remove("calibration")
    elif settings.get("moments"):
        words.append(_word("moments", settings["moments"]))
        groups = [name for name in groups if name != "calibration" or trains_branch(settings)]
    if not settings.get("bridge"):
        # A planner may have chosen another map of the bridge than the one that this run fitted.
        mapper = settings["mapper"] if "budget" in settings["plan"] else results["mapper"]
        words.append(f"mapper={mapper['name']}")
        words += [_word(f"mapper.{name}", value) for name, value in flatten(mapper).items() if name != "name"]
    words += [_word(name, settings[name]) for name in ("map", "storage") if settings.get(name) not in (None, "float32")]
    if "budget" in settings["plan"]:
        words.append("plan=auto")
        groups.insert(2, "planner")
    for group in groups:
        words += _overrides(group, settings[group])
    return " \\\n  ".join([*words, "out=DIR"])


def _context(results: dict[str, Any]) -> dict[str, Any]:
    return {
        "results": results,
        "findings": verdict(results),
        "columns": list(METRIC_NAMES.values()),
        "arms": arms_table(results),
        "arm_names": figures.ARM_NAMES,
        "lengths": length_section(results),
        "turns": turn_section(results),
        "probes": probe_section(results),
        "cost": cost_table(results),
        "benchmarks": benchmark_table(results),
        "benchmark_columns": BENCHMARK_COLUMNS,
        "command": reproduce(results),
        "figures": {
            "kl": figures.kl_by_position(results),
            "documents": figures.kl_by_document(results),
            "r2": figures.r2_heat_map(results),
            "layers": figures.selected_layers(results),
            "cost": figures.cost_bars(results),
        },
    }


def write_report(folder: Path) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` into the folder of a finished run.

    Returns:
        Their paths.

    Raises:
        UsageError: the folder holds no readable results.
    """
    page, twin = render(folder, ("report.html", "report.md"), _context(load_results(folder)))
    return page, twin


def _markdown_cell(text: str) -> str:
    """Text that neither ends a table's cell nor becomes markup."""
    for mark in "\\|<>`*_[]":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def render(folder: Path, names: Sequence[str], context: dict[str, Any]) -> list[Path]:
    """Write pages from the templates of the same names into a folder, each all of it or nothing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvbridge.eval"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"percent": percent, "cell": _markdown_cell}
    written = []
    for name in names:
        written.append(folder / name)
        write_whole(written[-1], environment.get_template(f"{name}.j2").render(context))
    return written
