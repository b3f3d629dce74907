"""``python -m tests.fuzz.campaign``: mutations of every checkpoint reader, with counts per reader.

A defect is printed with its reader and seed, and the campaign continues. The slow tests run
`MUTATIONS` too.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.fuzz.limits import OvertimeError, limit_memory
from tilewright.cli.main import report_errors
from tilewright.options.arguments import integer, option, parse

_STORY = "Mutate files of every checkpoint reader, and count refusals and defects."

MUTATIONS, SEED = 1_000_000, 1000
_SECONDS = 5
"""CPU time of a mutation."""
_ROUNDS = 20
_MOST_PRINTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    mutations: int = option(
        "mutations of all readers (default: 1000000)", default=MUTATIONS, type=integer(1, 1 << 40)
    )
    seed: int = option("first seed (default: 1000)", default=SEED, type=integer(0, 1 << 40))


def seeds_of(num_readers: int, *, mutations: int = MUTATIONS, seed: int = SEED) -> range:
    """Return the seeds for each of several readers."""
    return range(seed, seed + mutations // num_readers)


def run_many(run: Callable[[int], bool], name: str, num_readers: int) -> None:
    """Run a reader's share of the mutations."""
    for seed in seeds_of(num_readers):
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed} of {name}") from error


class Campaign:
    """Counts of mutations, refusals and defects by reader."""

    def __init__(self, readers: dict[str, Callable[[int], bool]]) -> None:
        self._readers = readers
        self.counts, self.refused, self.defects = (dict.fromkeys(readers, 0) for _ in range(3))

    def run(self, seeds: range) -> None:
        """Run every reader on ``seeds``."""
        for name, run in self._readers.items():
            for seed in seeds:
                self._run_one(name, run, seed)

    def _run_one(self, name: str, run: Callable[[int], bool], seed: int) -> None:
        self.counts[name] += 1
        try:
            with _overtime():
                self.refused[name] += run(seed)
        except (Exception, OvertimeError) as error:
            self.defects[name] += 1
            if self.defects[name] <= _MOST_PRINTED:
                print(f"defect: {name}, seed {seed}: {type(error).__name__}: {error}"[:400])
                traceback.print_exc(limit=-4, file=sys.stdout)

    def table(self) -> str:
        """Return the counts as a table."""
        lines = ["| reader | mutations | refused | defects |", "|---|---|---|---|"]
        for name in self._readers:
            counts = self.counts[name], self.refused[name], self.defects[name]
            lines.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
        return "\n".join(lines)


@contextmanager
def _overtime() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: object) -> None:
    raise OvertimeError(f"more than {_SECONDS} seconds")


def main(argv: Sequence[str]) -> int:
    """Run the campaign in rounds, and print the counts. Return 1 after a defect."""
    options = parse(_Options, argv, prog="python -m tests.fuzz.campaign", description=_STORY)
    import torch

    from tests.fuzz import test_fuzz_gguf_types as ggufs
    from tests.fuzz import test_fuzz_readers as folders

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        readers: dict[str, Callable[[int], bool]] = {
            **{name: partial(folders.run, name) for name in folders.CASES},
            **{f"GGUF {name}": partial(ggufs.run, Path(root), name) for name in ggufs.CASES},
        }
        signal.signal(signal.SIGPROF, _stop)
        limit_memory(1 << 30)
        campaign, start = Campaign(readers), time.monotonic()
        seeds = seeds_of(len(readers), mutations=options.mutations, seed=options.seed)
        size = -(-len(seeds) // _ROUNDS)
        for round_ in range(_ROUNDS):
            campaign.run(seeds[round_ * size : (round_ + 1) * size])
            total, defects = (sum(c.values()) for c in (campaign.counts, campaign.defects))
            elapsed = time.monotonic() - start
            print(f"{total} mutations, {defects} defects, {elapsed:.0f} s", flush=True)
        print(campaign.table())
        return int(bool(sum(campaign.defects.values())))


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
