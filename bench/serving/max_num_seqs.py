"""Compare servers of 8 sequences and of ``--max-num-seqs auto`` on one GPU, in turn.

Run ``python -m bench.serving.max_num_seqs --model shape:llama-3.1-8b --precision bf16``. It prints
the start time, the KV pages and the decode speed of one user. Exit code 1: a median differs by more
than 2 %. ``--users 64`` also prints the throughput beside ``--arithmetic fast``, which keeps the
workspace of cuBLAS. Excludes the time to compile: the first server of each kind is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.common import TILEWRIGHT, Server, running
from tilewright.evaluate.load.client import COMPLETIONS, Client, at_most, connected

_LIMIT = 0.02
_METRICS = ("start (s)", "KV pages", "one user (tokens/s)", "all users (tokens/s)")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=0)
    asked = parser.parse_args(argv)
    options = ("--target", asked.target, "--precision", asked.precision, "--no-prefix-cache")
    command = (*TILEWRIGHT, "serve", asked.model, *options)
    kinds = [Server("8", (*command, "--max-num-seqs", "8")), Server("auto", command)]
    if asked.users:
        fast = ("--max-num-seqs", "256", "--arithmetic", "fast")
        kinds.append(Server("256 fast", (*command, *fast)))
    found: dict[str, list[tuple[float, ...]]] = {each.name: [] for each in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for number, server in product(range(1 + asked.rounds), kinds):
            began = time.perf_counter()
            with running(server, Path(folder) / "log") as url:
                started = time.perf_counter() - began
                row = (started, *asyncio.run(_measure(url, asked.users)))
            if number:
                found[server.name].append(row)
            print(number, server.name, [round(each, 2) for each in row], flush=True)
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    worst = 0.0
    for index, metric in enumerate(_METRICS[: len(medians["auto"])]):
        values = {name: round(each[index], 2) for name, each in medians.items()}
        print(metric, values)
        if index < 3 and medians["8"][index]:
            base, other = medians["8"][index], medians["auto"][index]
            worst = max(worst, (other - base) / base if not index else (base - other) / base)
    print(f"worst loss of auto: {worst:.1%}; allowed: {_LIMIT:.0%}")
    return int(worst > _LIMIT)


async def _measure(url: str, users: int) -> tuple[float, ...]:
    async with connected(url, "") as client:
        pages = (await client.told("/props"))["num_pages"]
        await _speed(client, 1, 1)
        found = float(pages), await _speed(client, 1, 3)
        if not users:
            return found
        await _speed(client, users, users)  # captures the steps that were left to idle time
        return (*found, await _speed(client, users, 3 * users))


async def _speed(client: Client, users: int, count: int) -> float:
    """Return the output tokens a second of ``count`` requests, ``users`` at a time."""
    body: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True, "temperature": 0.0}
    jobs = [
        partial(client.stream, COMPLETIONS, {**body, "prompt": [1 + n % 99] * 128})
        for n in range(count)
    ]
    began = time.perf_counter()
    heard, _ = await at_most(users, jobs)
    failed = [each.error for each in heard if each.error]
    assert not failed, failed[0]
    return 256 * count / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
