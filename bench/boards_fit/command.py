"""``bench fit-perf-model``: fit the Tenstorrent performance model to published speeds.

Holds out whole models and boards, and writes the constants to the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.terminal.console import err, out
from tilewright.errors import ConfigError
from tilewright.evaluate.report import perf_md
from tilewright.options.arguments import option, parse
from tilewright.utils.files import replace_file

if TYPE_CHECKING:
    from bench.boards_fit.report import Study

_ROOT = Path(__file__).resolve().parents[2]
SPEEDS = "tests/goldens/seed_perf.md"
_BEGIN, _END = "# fitted: begin\n", "# fitted: end\n"
_TOLERANCE = 2e-3
EXIT_STALE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    speeds: str = option(
        f"published speeds ({SPEEDS})", default=str(_ROOT / SPEEDS), metavar="FILE"
    )
    write: bool = option("write the constants to the source", default=False)


def main(argv: Sequence[str]) -> int:
    """Fit the boards' time model. Return 1 if the constants in the source differ.

    Raises:
        TilewrightError: for wrong arguments, or an unreadable or unwritable file.
    """
    options = parse(
        _Options,
        argv,
        prog="python -m bench fit-perf-model",
        description="Fit the performance model of Tenstorrent boards to published speeds.",
    )
    document = perf_md.load(options.speeds)
    # The imports take seconds. Help and argument errors do not wait for them.
    from bench.boards_fit.blackhole import blackhole_report, blackhole_source, study_blackhole
    from bench.boards_fit.programs import READINGS, Programs
    from bench.boards_fit.report import study_report, study_rows
    from bench.boards_fit.rows import read_rows
    from tilewright.compiler.targets.tenstorrent.perf import blackhole as perf_blackhole
    from tilewright.compiler.targets.tenstorrent.perf import constants as perf_constants

    programs = Programs()
    studies = [study_rows(each, read_rows(document, programs, each)) for each in READINGS]
    report = study_report(studies)
    out().print(report, soft_wrap=True, markup=False, highlight=False)
    used, blackhole = studies[0], study_blackhole()
    out().print(blackhole_report(blackhole), soft_wrap=True, markup=False, highlight=False)
    source = blackhole_source(blackhole)
    path = Path(perf_blackhole.__file__)
    if options.write:
        write_constants(Path(perf_constants.__file__), used)
        replace_source(path, source)
    elif not is_kept(used) or fitted_source(path) != source:
        err().print("the constants kept are not these; --write keeps them", style="yellow")
        return EXIT_STALE
    return 0


def is_kept(study: Study) -> bool:
    """Return whether the source has a fit's constants."""
    from tilewright.compiler.targets.tenstorrent.perf.constants import ERROR_BARS, FITTED

    pairs = [
        (getattr(FITTED, field.name), getattr(study.constants, field.name))
        for field in dataclasses.fields(FITTED)
    ]
    for name, found in study.bars().items():
        pairs += zip(ERROR_BARS[name], found, strict=True)
    return all(abs(kept / found - 1) < _TOLERANCE for kept, found in pairs)


def write_constants(path: Path, study: Study) -> None:
    """Write a fit's constants between the marks of a source file.

    Raises:
        ConfigError: if the file is unreadable, unwritable or without marks.
    """
    lines = "".join(
        f"    {field.name}={getattr(study.constants, field.name):.4g},\n"
        for field in dataclasses.fields(study.constants)
    )
    bars = "".join(
        f'    "{name}": ({step:.3f}, {prompt:.3f}),\n'
        for name, (step, prompt) in study.bars().items()
    )
    replace_source(path, f"FITTED = Constants(\n{lines})\nERROR_BARS = {{\n{bars}}}\n")


def fitted_source(path: Path) -> str:
    """Return the text between the marks of a source file."""
    return path.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


def replace_source(path: Path, made: str) -> None:
    """Write text between the marks of a source file.

    Raises:
        ConfigError: if the file is unreadable, unwritable or without marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
        before, mark, rest = text.partition(_BEGIN)
        _, end, after = rest.partition(_END)
        if not mark or not end:
            raise ConfigError(f"{path}: no lines {_BEGIN.strip()!r} and {_END.strip()!r}")
        replace_file(path, f"{before}{mark}{made}{end}{after}".encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
