"""``tilewright bench --url``: load tests for a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.errors import ConfigError, TilewrightError, allowed
from tilewright.evaluate.load.shape import LoadConfig
from tilewright.options.arguments import integer, option, parse, real
from tilewright.utils.json_lines import append_lines

if TYPE_CHECKING:
    from tilewright.evaluate.load.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchServeArgs(LoadConfig):
    url: str = option("server address", default="http://127.0.0.1:8000")
    model: str = option("model name (default: the server's first)", default="")
    scenario: str = option(
        "load: streams, overhead, intruder, chat, contest, json, invariant or soak",
        default="streams",
        aliases=("--plan",),
    )
    warm_up: int = option("uncounted requests before", default=2, type=integer(0, 1000))
    wait: float = option("maximum wait for loading, in seconds", default=600.0, type=real(0, 1e6))
    rounds: int = option("rounds to run", default=1, type=integer(1, 1000))
    results: Path | None = option("JSON lines file for every row", default=None, type=Path)
    as_json: bool = option("print JSON", "--json", default=False)


def main(argv: list[str]) -> int:
    """Run the scenario. Return 1 if a request failed or an answer was wrong."""
    text = "Run a load test on a server."
    options = parse(_BenchServeArgs, argv, prog="tilewright bench --url URL", description=text)
    from tilewright.evaluate.load.contest import LEVELS
    from tilewright.evaluate.load.scenarios import SCENARIOS

    for level in options.levels:
        if level not in LEVELS:
            raise ConfigError(f"--levels {level}; {allowed(LEVELS)}")
    if options.scenario not in SCENARIOS:
        raise ConfigError(
            f"unknown scenario {options.scenario!r}; {allowed(SCENARIOS, options.scenario)}"
        )
    try:
        return asyncio.run(_tell(options))
    except (OSError, TilewrightError) as error:
        raise TilewrightError(f"{options.url}: {error}") from None


async def _tell(options: _BenchServeArgs) -> int:
    """Print and record every row at once. Return the exit code."""
    has_failed = False
    async for row in _run(options):
        has_failed |= bool(row.get("failed"))
        line = json.dumps({**asdict(options), "results": None, **row})
        if options.results is not None:
            append_lines(options.results, line.encode() + b"\n")
        if options.as_json:
            print(line, flush=True)
        else:
            for name, value in row.items():
                print(f"{name:<30} {value if isinstance(value, str) else f'{value:.6g}'}")
            print(flush=True)
    return int(has_failed)


async def _run(options: _BenchServeArgs) -> AsyncIterator[Figures]:
    from tilewright.evaluate.load.client import connected
    from tilewright.evaluate.load.figures import rows_of
    from tilewright.evaluate.load.scenarios import SCENARIOS, streams

    async with connected(options.url, options.model) as client:
        await client.wait_until_ready(options.wait)
        if not options.model:
            await client.take_model()
        if options.warm_up:
            seed = options.seed + 1
            warm = replace(options, requests=options.warm_up, seed=seed, rate=0.0)
            await rows_of(streams(client, warm))
        for round_number in range(options.rounds):
            async for row in SCENARIOS[options.scenario](client, options):
                # Recorded rows have this key.
                yield {"plan": options.scenario, "round": round_number, **row}
