"""Runs of one model on several targets over the same positions: their lines, joined and compared.

A line keeps every position, so that runs made on different machines can be paired. Imports no
torch; how a run is made is not known here (windows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tilewright.errors import ConfigError
from tilewright.evaluate.results.record import Paired, pack_hits, unpack_hits
from tilewright.evaluate.results.stats import Ratio, mean_and_error, mean_ratio
from tilewright.utils.json_lines import Located, append_lines, read_records

VERSION = 1
BASE_RUN = "cpu"
"""The run whose hits are compared with, within a precision: what a user of the CPU gets."""
EXACT_RUN = "cpu:exact"
"""The run whose hits and KL are compared with: the same precision in float arithmetic."""

_WHAT = "runs file"
_DIGITS = 6
_MOST_UNLIKE = 0.005
"""The share of positions at which two fp32 references may guess otherwise: rounding decides ties,
and another model is far beyond it.
"""


class TargetRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One precision on one target, over all windows; positions in the windows' order.

    Attributes:
        text_hash: of the ids of all windows.
        batch: windows run side by side.
        expected: the fp32 reference's first guess at every position.
        guesses: this run's.
        top5_hits: where the guess was among the reference's five, as `pack_hits` writes it.
        kl: KL(reference || run) in nats, of six digits.
        kl_error: standard error of ``kl_mean``, positions taken as independent.

    Raises:
        ConfigError: where the positions and what is said of them do not agree.
    """

    version: int
    model: str
    model_hash: str
    text_hash: str
    num_windows: int
    num_positions: int
    precision: str
    precision_id: str
    heading: str
    effective_id: str
    target: str
    compute: str
    batch: int
    device: str
    device_detail: str
    num_top1: int
    num_top5: int
    kl_mean: float
    kl_error: float
    versions: dict[str, str]
    commit: str | None
    host: str
    timestamp: str
    expected: tuple[int, ...]
    guesses: tuple[int, ...]
    top5_hits: str
    kl: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"version {self.version}; allowed: {VERSION}")
        for name in ("expected", "guesses", "kl"):
            count = len(getattr(self, name))
            if count != self.num_positions or count < 2:
                raise ConfigError(
                    f"{count} {name} for {self.num_positions} positions; "
                    "allowed: one each, of two or more"
                )
        if not all(0 <= value < math.inf for value in self.kl):
            raise ConfigError("kl below 0 or not finite; allowed: nats from 0")
        told = (self.num_top1, self.num_top5, self.kl_mean, self.kl_error)
        hits = sum(self.hits(self.expected)), sum(unpack_hits(self.top5_hits, self.num_positions))
        if told != (*hits, *mean_and_error(self.kl)):
            raise ConfigError("the positions do not give the figures beside them; it was changed")

    @property
    def run(self) -> str:
        """Target and arithmetic as the command line names them."""
        return self.target if self.compute == "fast" else f"{self.target}:{self.compute}"

    def hits(self, expected: Sequence[int]) -> list[bool]:
        """Whether the guess is what a reference expects, for every position."""
        return [one == other for one, other in zip(self.guesses, expected, strict=True)]


@dataclass(frozen=True, slots=True)
class Compared:
    """A run beside the others of its precision; None where there is none to compare with.

    ``num_top1``: against the reference that all runs of a comparison share; top-5 stays against the
    run's own. ``num_unlike``: positions at which that one's first guess is another.
    """

    run: TargetRun
    num_top1: int
    num_unlike: int
    paired: Paired | None
    paired_exact: Paired | None
    kl_ratio: Ratio | None


def figures(
    guesses: Sequence[int], fives: Sequence[Sequence[int]], kl: Sequence[float]
) -> dict[str, object]:
    """The fields of a `TargetRun` that follow from its positions.

    ``fives``: the reference's five likeliest ids at each.
    """
    kept = tuple(float(f"{value:.{_DIGITS}g}") for value in kl)
    mean, error = mean_and_error(kept)
    among = [guess in five for guess, five in zip(guesses, fives, strict=True)]
    expected = tuple(five[0] for five in fives)
    return {
        "num_positions": len(expected),
        "num_top1": sum(one == other for one, other in zip(guesses, expected, strict=True)),
        "num_top5": sum(among),
        "kl_mean": mean,
        "kl_error": error,
        "expected": expected,
        "guesses": tuple(guesses),
        "top5_hits": pack_hits(among),
        "kl": kept,
    }


def append_run(path: Path, run: TargetRun) -> None:
    """Add one line to a file, whole or not at all. Raises ConfigError."""
    append_lines(path, msgspec.json.encode(run) + b"\n", _WHAT)


def read_runs(path: Path) -> list[Located[TargetRun]]:
    """Every run of a file; a last line cut short by a crash is dropped with a warning.

    Raises:
        ConfigError: naming file and line, for any other line that is no run.
    """
    return read_records(path, _DECODER.decode, _WHAT, expected="not a run")


_DECODER: msgspec.json.Decoder[TargetRun] = msgspec.json.Decoder(TargetRun)


def check_same(
    located: Sequence[Located[TargetRun]], *, model_hash: str, text_hash: str, what: str
) -> None:
    """Only runs of one model over the same windows can be paired.

    ``what`` says whose the two hashes are.

    Raises:
        ConfigError: naming the first run that is of something else.
    """
    for each in located:
        run = each.record
        for name, found, wanted in (
            ("model", run.model_hash, model_hash),
            ("text", run.text_hash, text_hash),
        ):
            if found != wanted:
                raise ConfigError(
                    f"{each.place}: is of another {name}, {found[:12]!r} in "
                    f"{run.num_windows} windows; allowed: {wanted[:12]!r}, as {what}"
                )


def latest(located: Sequence[Located[TargetRun]]) -> list[TargetRun]:
    """The runs in order, where one was made more than once the last of them."""
    runs = [each.record for each in located]
    return list({(run.precision_id, run.run): run for run in runs}.values())


def compare_runs(runs: Sequence[TargetRun]) -> list[Compared]:
    """Each run beside `BASE_RUN` and `EXACT_RUN` of its precision, position by position.

    Two machines' fp32 references may break a tie differently, so all guesses are compared with the
    first run's reference.

    Raises:
        ConfigError: where a reference differs by more than ties can make it.
    """
    by_name = {(run.precision_id, run.run): run for run in runs}
    found, expected = [], runs[0].expected
    for run in runs:
        num_unlike = sum(one != other for one, other in zip(run.expected, expected, strict=True))
        if num_unlike > _MOST_UNLIKE * len(expected):
            raise ConfigError(
                f"{run.precision} on {run.run}: its fp32 reference guesses otherwise at "
                f"{num_unlike} of {len(expected)} positions; allowed: {100 * _MOST_UNLIKE:g} % of "
                "them"
            )
        hits = run.hits(expected)
        base, exact = (by_name.get((run.precision_id, name)) for name in (BASE_RUN, EXACT_RUN))
        paired, paired_exact = (
            None
            if other is None or other is run
            else Paired.from_hits(other.run, theirs=other.hits(expected), ours=hits)
            for other in (base, exact)
        )
        ratio = None if exact is None or exact is run else mean_ratio(run.kl, exact.kl)
        found.append(Compared(run, sum(hits), num_unlike, paired, paired_exact, ratio))
    return found
