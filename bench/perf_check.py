"""``python -m bench perf-check``: measure PERF.md's rows again, and compare the values.

Records contain their commands. Rows for another machine are skipped with a reason.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cuda.rows import ROWS
from tilewright.compiler.devices import CPU_BACKENDS, describe_cpu, target_options
from tilewright.errors import CheckpointError, ConfigError
from tilewright.evaluate.cases.cases import CASES
from tilewright.evaluate.report.display import decimal, span
from tilewright.evaluate.results import row
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import read
from tilewright.evaluate.results.selection import (
    BATCH_32,
    SHORT,
    SpeedTable,
    context_lengths,
    group_results,
    is_placed,
    several_users,
)
from tilewright.evaluate.store import read_store, select
from tilewright.options.arguments import option, parse, real
from tilewright.utils.child_process import PYTHON, Child

EXIT_NOT_REPRODUCED = 1
ACCURACY_POINTS = 0.5
"""Allowed difference in top-1 and top-5, in percentage points for equal positions."""
_TOLERANCE = 5.0
_RECORDS = ("cpu.jsonl", "h200.jsonl")
_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "results"
_PROGRAMS = {"bench": ("-m", "tilewright.cli.main"), "bench-cuda": (str(_ROOT / "bench"),)}
_COMMANDS = (*(f"tilewright {verb} " for verb in _PROGRAMS), "python -m bench bench-cuda ")
_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_THREADS = re.compile(r"\b([0-9]+) threads\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    results: tuple[str, ...] = option(
        f"JSON lines (default: {', '.join(_RECORDS)} in results/)",
        default=tuple(str(_FOLDER / name) for name in _RECORDS),
        metavar="FILE",
    )
    precisions: tuple[str, ...] = option("precisions to measure", default=(), metavar="NAME")
    cases: tuple[str, ...] = option("cases to measure", default=(), metavar="NAME")
    tolerance: float = option(
        "minimum half width of an interval, in percent", default=_TOLERANCE, type=real(0, 100)
    )
    list: bool = option("list the rows without a measurement", default=False)


@dataclass(frozen=True, slots=True)
class Claim:
    """A record with values in PERF.md: speed and TTFT, accuracy, or both."""

    record: Result
    has_speed: bool
    has_accuracy: bool

    @property
    def title(self) -> str:
        """The row of PERF.md in words."""
        r = self.record
        return f"{row.device_text(r)}, {row.model_text(r)}, {r.precision_name}, {r.case}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A repeated measurement, with the recorded and the new value."""

    figure: str
    recorded: str
    now: str
    is_reproduced: bool


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench perf-check``. Return 1 if a value is not reproduced.

    Raises:
        ConfigError: for wrong arguments, or without a row for this machine.
    """
    words = "Measure the rows of PERF.md again and print the reproduced rows."
    options = parse(_Options, argv, prog="python -m bench perf-check", description=words)
    recorded = claims(read_store(*map(Path, options.results)))
    chosen = {"precision_name": options.precisions, "case": options.cases}
    wanted = [claim for claim in recorded if select([claim.record], **chosen)]
    here = []
    for claim in wanted:
        if reason := reason_to_skip(claim.record):
            print(f"skipped         {claim.title}: {reason}")
        else:
            here.append(claim)
    if not here:
        raise ConfigError(f"none of {len(wanted)} rows can be measured here; allowed: one or more")
    if options.list:
        print("\n".join(f"to be measured  {claim.title}" for claim in here))
        return 0
    num_figures = num_missed = 0
    for claim, again in measured_again(here):
        verdicts = [Verdict("not measured", "", again, False)] if isinstance(again, str) else []
        if not isinstance(again, str):
            verdicts = compare(claim, again, tolerance=options.tolerance / 100)
        for each in verdicts:
            num_figures += 1
            num_missed += not each.is_reproduced
            word = "reproduced" if each.is_reproduced else "NOT REPRODUCED"
            print(f"{word:<15} {claim.title}: {each.figure} {each.recorded}, now {each.now}")
    print(f"{num_figures - num_missed} of {num_figures} figures of {len(here)} records reproduced")
    return EXIT_NOT_REPRODUCED if num_missed else 0


def claims(results: Sequence[Result]) -> list[Claim]:
    """Return PERF.md's measured records in row order."""
    speeds: dict[int, Result] = {}
    accuracies: dict[int, Result] = {}
    for group in group_results([r for r in results if r.kind == "measured" and is_placed(r)]):
        tables: list[SpeedTable] = [SHORT, BATCH_32]
        tables += [*context_lengths([group]), *several_users([group])]
        speeds |= {id(r): r for table in tables if (r := group.speed(table)) is not None}
        if (of_accuracy := group.accuracy_result) is not None:
            accuracies[id(of_accuracy)] = of_accuracy
    found = {**speeds, **accuracies}
    return [Claim(record, key in speeds, key in accuracies) for key, record in found.items()]


def reason_to_skip(record: Result) -> str:
    """Return the reason for skipping a record on this machine, or an empty text."""
    if record.calibration:
        return f"its calibrated folder is not recorded ({record.calibration})"
    if record.target.startswith("cpu"):
        cpu = describe_cpu()
        if not record.device_detail.startswith(cpu.model_name) or _threads(record) > cpu.num_cores:
            here = f"{cpu.model_name} with {cpu.num_cores} cores"
            return f"was measured on {record.device_detail}; this is {here}"
    else:
        name = _gpu_name() if record.target == "cuda" else ""
        if not re.search(rf"\b{re.escape(record.device)}\b", name):
            return f"no {record.device} here" + (f"; this is {name}" if name else "")
    if record.command:
        is_known = record.command.startswith(_COMMANDS)
        return "" if is_known else f"its command is none that is run here: {record.command}"
    if record.weights != "random" and record.model != _DEFAULT_MODEL:
        return f"where the weights of {record.model} lie is not recorded"
    if record.weights != "random" and not _has_default_model():
        return f"the package with {record.model} is not installed"
    if cuda_row(record) is None and record.case not in CASES:
        return f"case {record.case} was changed by options that are not recorded"
    return ""


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _has_default_model() -> bool:
    from tilewright.models import find_model

    try:
        find_model()
    except CheckpointError:
        return False
    return True


def _threads(record: Result) -> int:
    found = _THREADS.search(record.device_detail)
    return int(found[1]) if found else 0


def cuda_row(record: Result) -> str | None:
    """Return a record's row name in ``bench-cuda``."""
    if record.target != "cuda" or record.weights != "random":
        return None
    wanted = record.model.lower(), record.precision_name, record.batch, record.prompt_length
    for each in ROWS:
        model, precision, context = each.program
        found = model, precision, each.batch, each.prompt_length
        if found == wanted and context == record.context:
            return each.name
    return None


def command_of(record: Result) -> list[str]:
    """Return the recorded arguments of ``tilewright``, or arguments made from the fields."""
    if record.command:
        words = shlex.split(record.command.removeprefix("python -m "))[1:]
    else:
        words = ["bench", "--case", record.case, "--precision", record.precision_name]
        if record.weights == "random":
            words += ["--model", f"shape:{record.model.lower()}"]
        if record.target not in CPU_BACKENDS.values():
            words += target_options(record.target)
    if record.target in CPU_BACKENDS.values() and "--backend" not in words:
        words += target_options(record.target)[2:]
    if record.target.startswith("cpu") and "--threads" not in words and _threads(record):
        words += ["--threads", str(_threads(record))]
    return words


def measured_again(here: Sequence[Claim]) -> Iterator[tuple[Claim, Result | str]]:
    """Yield each claim with its new record or an error.

    ``bench-cuda`` rows share a process with its compiled programs.
    """
    rows = {id(each): cuda_row(each.record) for each in here}
    shared = [each for each in here if rows[id(each)]]
    for each in here:
        if not rows[id(each)]:
            found = run(command_of(each.record))
            yield each, found if isinstance(found, str) else found[-1]
    if not shared:
        return
    found = run(["bench-cuda", "--rows", *dict.fromkeys(str(rows[id(each)]) for each in shared)])
    new = {} if isinstance(found, str) else {_key(record): record for record in found}
    missing = found if isinstance(found, str) else "bench-cuda did not measure it"
    for each in shared:
        yield each, new.get(_key(each.record), missing)


def _key(record: Result) -> tuple[object, ...]:
    r = record
    return r.model, r.precision_name, r.batch, r.prompt_length, r.num_generated, r.context


def run(words: Sequence[str]) -> list[Result] | str:
    """Return a command's results, or its exit status without results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        command = [*PYTHON, *_PROGRAMS[words[0]], *words, "--results", str(path)]
        with Child(command) as child:
            ended = child.wait()
        assert ended is not None
        found = read(path) if path.exists() else []
        return found or f"{ended.how}: {ended.last}"


def compare(claim: Claim, now: Result, *, tolerance: float) -> list[Verdict]:
    """Compare a claim's values with a new record.

    Speeds are equal if their 95 % intervals overlap. ``tolerance`` is the minimum half width, as a
    fraction of the median.
    """
    old, found = claim.record, []
    if now.effective_id != old.effective_id:
        found.append(Verdict("arithmetic", old.effective_id, now.effective_id, False))
    if claim.has_speed:
        for figure, field in ((row.SPEED, "decode_tsu"), (row.TTFT, "ttft_ms")):
            before, after = getattr(old, field), getattr(now, field)
            if before is None or after is None:
                continue
            ends = [_ends(record, field, tolerance=tolerance) for record in (old, now)]
            is_same = ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]
            before_after = [
                f"{decimal(value)} ({span(*each)})"
                for value, each in zip((before, after), ends, strict=True)
            ]
            found.append(Verdict(figure, before_after[0], before_after[1], is_same))
    if claim.has_accuracy:
        was, has = row.accuracy_figures(old.accuracy), row.accuracy_figures(now.accuracy)
        for figure, name in ((row.TOP1, "top1_percent"), (row.TOP5, "top5_percent")):
            is_same = has[name] is not None and abs(was[name] - has[name]) <= ACCURACY_POINTS
            found.append(Verdict(figure, decimal(was[name]), decimal(has[name], none="-"), is_same))
    return found


def _ends(record: Result, field: str, *, tolerance: float) -> tuple[float, float]:
    middle = getattr(record, field)
    low, high = row.interval(record, field) or (middle, middle)
    return min(low, middle * (1 - tolerance)), max(high, middle * (1 + tolerance))
