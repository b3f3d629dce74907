"""What ``tilewright compare`` found, as a JSON record and as tables made of that record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.peers import PEERS
from bench.peers.rounds import Contestant, ratios
from tilewright.compiler.bench import stats
from tilewright.compiler.bench.display import megabytes, percent, with_spread
from tilewright.compiler.bench.table import Table
from tilewright.compiler.commands.console import print_table
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.environment import PACKAGES, environment

if TYPE_CHECKING:
    from rich.console import Console

    from bench.peers.options import CompareOptions
    from tilewright.models import LoadedModel


def report_record(
    model: LoadedModel,
    contestants: Sequence[Contestant],
    versus: Sequence[tuple[Contestant, Contestant]],
    *,
    options: CompareOptions,
    bandwidths: Sequence[float],
) -> dict[str, Any]:
    """Gather all figures as JSON values: repeats, bytes, rates a second, versions and host."""
    plan = options.plan
    bandwidth = statistics.median(bandwidths)
    surroundings = environment(
        (*PACKAGES, *(peer.package for peer in PEERS.values())), hash_host=True
    )
    return {
        "model": options.shape or model.name,
        "model_hash": model.checkpoint.content_hash(),
        "device": describe_cpu().model_name,
        "num_threads": options.num_threads,
        "num_rounds": len(bandwidths) - 1,
        "measures": [dataclasses.asdict(measure) for measure in plan.measures],
        "bandwidth": {"median": bandwidth, "readings": list(bandwidths)},
        "contestants": [each.record(plan, bandwidth) for each in contestants],
        "ratios": [
            {
                "ours": ours.name,
                "peer": peer.name,
                "measure": measure,
                "median": statistics.median(repeats),
                "repeats": repeats,
            }
            for ours, peer in versus
            for measure, repeats in ratios(ours, peer).items()
        ],
        **dataclasses.asdict(surroundings),
    }


def print_report(screen: Console, record: dict[str, Any]) -> None:
    """The tables of a record: medians, then ratios, with their spreads."""
    measures = [measure["name"] for measure in record["measures"]]
    title = (
        f"{record['model']}, {record['num_threads']} threads, {record['num_rounds']} rounds in "
        "turn: tokens/s, median (spread)"
    )
    columns = ("engine", "MB", *map(_heading, measures), "of read\nrate")
    lines = [_row(each, measures) for each in record["contestants"]]
    print_table(screen, title, Table.of(columns, lines), numbers=True)
    for each in record["contestants"]:
        if each["failure"]:
            screen.print(f"{each['engine']} {each['weights']}: {each['failure']}")
    pairs = dict.fromkeys((ratio["ours"], ratio["peer"]) for ratio in record["ratios"])
    found = {(r["ours"], r["peer"], r["measure"]): r["repeats"] for r in record["ratios"]}
    if pairs:
        lines = [
            (f"{ours} / {peer}", *(_ratio(found.get((ours, peer, name))) for name in measures))
            for ours, peer in pairs
        ]
        title = "ours / peer, round by round: median (spread); above 1 ours is faster"
        table = Table.of(("ours / peer", *map(_heading, measures)), lines)
        print_table(screen, title, table, numbers=True)
    readings = [reading / 1e9 for reading in record["bandwidth"]["readings"]]
    screen.print(
        f"memory read by {record['num_threads']} threads: {readings[0]:.1f} GB/s before, "
        f"{readings[-1]:.1f} after ({min(readings):.1f} to {max(readings):.1f}); "
        f"{record['device']}",
        style="dim",
    )


def _heading(measure: str) -> str:
    return measure.replace("-", "\n")


def _row(contestant: dict[str, Any], measures: Sequence[str]) -> tuple[str, ...]:
    size, share = contestant["weight_bytes"], contestant["bandwidth_share"]
    return (
        f"{contestant['engine']} {contestant['weights']}",
        megabytes(size, none="-", grouped=True),
        *(_rate(contestant["rates"].get(measure)) for measure in measures),
        "-" if share is None else f"{percent(share, 0)} %",
    )


def _rate(rate: dict[str, Any] | None) -> str:
    return "-" if rate is None else _figure(f"{rate['median']:,.0f}", rate["repeats"])


def _ratio(repeats: Sequence[float] | None) -> str:
    return _figure(f"{statistics.median(repeats):.2f}", repeats) if repeats else "-"


def _figure(text: str, repeats: Sequence[float]) -> str:
    return with_spread(text, stats.spread(repeats) if len(repeats) > 1 else None, 0)
