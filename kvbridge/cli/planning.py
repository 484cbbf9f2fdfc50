"""Map and plan of a hand-off: given by the settings, or chosen from a bridge's measured points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from kvbridge.bridge import Bridge
from kvbridge.cli.settings import Settings
from kvbridge.errors import PlanError, UsageError
from kvbridge.flops import ModelCost
from kvbridge.pair import ModelPair, Pair, located
from kvbridge.plan import HandoffPlan
from kvbridge.planner import choose, points_at, require_saving
from kvbridge.processes import alone, process_state


@dataclass(frozen=True, slots=True)
class Chosen:
    """What will be scored.

    Attributes:
        plan: what the target computes natively.
        map: name of the map in its bridge.
        planning: where it was chosen: budget, and what it was chosen from.
    """

    plan: HandoffPlan
    map: str
    planning: dict[str, Any] | None = None


def require_one_process(command: str) -> None:
    """Refuse to be launched in several processes.

    Raises:
        UsageError: there are several.
    """
    started = process_state().num_processes
    if started > 1:
        raise UsageError(f"{command} works in one process and was started in {started}; start it alone.")


def provisional(settings: Settings) -> HandoffPlan:
    """The plan that everything is checked with before one is chosen: of those tried, the one that carries least."""
    if isinstance(settings.plan, HandoffPlan):
        return settings.plan
    return HandoffPlan(sinks=settings.plan.sinks, native_tail=max(settings.planner.native_tail))


def check_cost(settings: Settings, pair: Pair) -> None:
    """Refuse, before anything is collected or solved, a mapper whose map would cost as much as it saves.

    Raises:
        PlanError: naming what the map would cost and what it would save.
    """
    from kvbridge.mappers.base import CostedMapper, Unfitted

    if isinstance(settings.mapper, CostedMapper):
        expected = Unfitted(settings.mapper, pair.geometry("source"), pair.geometry("target"), settings.residual)
        name = f"the map of mapper={settings.plain['mapper']['name']}"
        name += " with its residual branch" if settings.residual.wanted else ""
        cost, dearest = pair.record("target").cost, settings.planner.dearest
        require_saving(name, expected, provisional(settings), cost, settings.eval.prompt, dearest)


def with_points(settings: Settings, pair: ModelPair, bridge: Bridge, folder: Path) -> Bridge:
    """A bridge with the points that its folder lacks measured and stored.

    Raises:
        PlanError: no map and plan is worth measuring.
        UsageError, CorpusError: settings or text that cannot work.
    """
    from kvbridge.eval.points import measure_points
    from kvbridge.eval.suite import Task

    if settings.planner.documents < 1:
        raise UsageError("planner.documents=0: give documents to measure points on.")
    task = Task.of(pair, provisional(settings), settings.eval, settings.out)
    measured = replace(bridge, points=measure_points(task, bridge, settings.planner))
    if measured.points != bridge.points:
        measured.save_points(folder)
    return measured


def chosen(settings: Settings, pair: ModelPair, bridge: Bridge) -> Chosen:
    """Map and plan that the settings name, or that the bridge's points say are best within the budget.

    Raises:
        UsageError: the bridge has no map of that name, or several and none is named.
        PlanError: there are no points, or none within the budget.
    """
    if isinstance(settings.plan, HandoffPlan):
        return Chosen(settings.plan, bridge.map_name(settings.map))
    maps = bridge.maps if settings.map is None else {settings.map: bridge.map(settings.map)}
    measured = sorted({point["map"] for point in bridge.points})
    if settings.map is not None and measured and settings.map not in measured:
        raise PlanError(
            f"the bridge has no measured points of map {settings.map} (it has some of {', '.join(measured)}), so no "
            "plan can be chosen; measure some with `kvbridge plan`, or leave out map=."
        )
    points = points_at(bridge.points, maps, ModelCost.of(pair.target), settings.eval.prompt)
    choice = choose(points, settings.plan)
    point = choice.point
    print(
        f"plan: map {point.map}, {point.text} at {point.share:.1%} of prefill, KL {point.kl:.3f} on planning documents"
    )
    return Chosen(point.plan, point.map, choice.to_dict())


def plan_command(config: DictConfig) -> None:
    """Measure the points that a bridge lacks, and show which map and plan is best for which budget."""
    settings = Settings.of(config)
    settings.refuse("moments")
    require_one_process("plan")
    if settings.planner.sizes:
        _show_sizes(settings)
        return
    location = settings.bridge_location()
    folder = Path(location).expanduser()
    with alone(settings.out, main=True):
        bridge = Bridge.from_pretrained(location)
        if settings.planner.documents:
            if not folder.is_dir():
                raise UsageError(
                    f"bridge={location} is no folder, and points are stored in the bridge; download it, or show what "
                    "it holds with planner.documents=0."
                )
            pair = settings.pair.load()
            bridge.require_pair(pair)
            bridge = with_points(settings, pair, bridge, folder)
        _show(settings, bridge)


def _show_sizes(settings: Settings) -> None:
    """Print how large calibration and map will be, from the two models' shapes alone."""
    from kvbridge.calibration.advice import advice
    from kvbridge.calibration.shapes import model_shape
    from kvbridge.calibration.sizes import SizeSettings, calibration_sizes, sizes_table
    from kvbridge.mappers.base import SizedMapper

    given = settings.calibration
    names = sorted({name for pair in settings.mapper.blocks() for name in pair if name.startswith("target.")})
    # What is multiplied with itself is read; the rest is made.
    read = tuple(name for name in names if (name, name) in settings.mapper.blocks())
    made = tuple(name for name in names if name not in read)
    more: dict[str, Any] = {"outputs": made} if made else {}
    if hasattr(settings.mapper, "rank"):
        more["rank"] = settings.mapper.rank
    planned = SizeSettings(
        inputs=read,
        tokens=given.tokens,
        held_out=given.held_out,
        block=given.block,
        sketch=given.sketch,
        memory_gb=given.memory_gb,
        prompt=settings.eval.prompt,
        **more,
    )
    source, target = (model_shape(name) for name in located(settings.pair.source, settings.pair.target))
    fit_bytes = settings.mapper.fit_bytes if isinstance(settings.mapper, SizedMapper) else None
    sizes = calibration_sizes(source, target, planned, fit_bytes)
    Console().print(sizes_table(sizes))
    said = None if fit_bytes is None else advice(sizes, settings.planner.memory_gb, fit_bytes)
    if said is not None:
        print(said)


def _show(settings: Settings, bridge: Bridge) -> None:
    from kvbridge.eval.plan_report import plan_context, write_plan_report

    if not bridge.points:
        raise UsageError("the bridge has no measured points; give planner.documents=20 or so to measure some.")
    own = [] if isinstance(settings.plan, HandoffPlan) else [settings.plan.budget]
    budgets: list[float] = sorted({*settings.planner.budgets, *own})
    context = plan_context(bridge, budgets)
    console = Console(width=120)
    table = Table(*context["columns"])
    for row in context["rows"]:
        table.add_row(*row["texts"], style="bold" if row["front"] else "dim")
    console.print(table)
    for sentence in (*context["choices"], context["caption"]):
        console.print(sentence, markup=False)
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "points.partial.jsonl").unlink(missing_ok=True)
    page, *_ = write_plan_report(settings.out, context)
    print(f"report: {page}")
