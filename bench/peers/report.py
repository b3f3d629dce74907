"""What ``python -m bench compare`` found, as a JSON record and as tables made of that record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.peers import PEERS
from bench.peers.rounds import Contestant, ratios
from bench.peers.tables import rates_table, source_of
from tilewright.cli.terminal.console import print_table
from tilewright.compiler.devices import describe_cpu
from tilewright.utils.environment import PACKAGES, environment

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
    """The table of a record, then what was not measured, and where the figures come from."""
    title = f"{record['model']}: tokens/s, then ours / theirs round by round: median (spread)"
    print_table(screen, title, rates_table(record, is_full=True), numbers=True)
    for each in record["contestants"]:
        if each["failure"]:
            screen.print(f"{each['engine']} {each['weights']}: {each['failure']}")
    screen.print(source_of(record), style="dim")
