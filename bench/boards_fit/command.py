"""``python -m bench fit-perf-model``: fit the time model of boards to published speeds.

Left-out models and boards give the errors. ``--write`` writes the constants to the source.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.cli.terminal.console import err, out
from tilewright.errors import ConfigError
from tilewright.evaluate.report import perf_md
from tilewright.options.arguments import option, parse
from tilewright.utils.files import read_text, write_file

_ROOT = Path(__file__).resolve().parents[2]
SPEEDS = "tests/goldens/seed_perf.md"
_BEGIN, _END = "# fitted: begin\n", "# fitted: end\n"
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
_TOLERANCE = 5e-3
EXIT_STALE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    speeds: str = option(SPEEDS, default=str(_ROOT / SPEEDS), metavar="FILE")
    write: bool = option("write the constants to the source", default=False)


def main(argv: Sequence[str]) -> int:
    """Fit the time models. Return 1 if the constants in the source differ.

    Raises:
        TilewrightError: for bad arguments, or a file that cannot be read or written.
    """
    words = "Fit the performance model of Tenstorrent boards to published speeds."
    options = parse(_Options, argv, prog="python -m bench fit-perf-model", description=words)
    document = perf_md.load(options.speeds)
    # These imports take seconds. Help and errors do not need them.
    from bench.boards_fit.blackhole import blackhole_report, study_blackhole
    from bench.boards_fit.programs import Programs
    from bench.boards_fit.report import study_report, study_rows
    from bench.boards_fit.wormhole import read_rows
    from tilewright.compiler.targets.tenstorrent.perf import blackhole as perf_blackhole
    from tilewright.compiler.targets.tenstorrent.perf import constants as perf_constants

    study, blackhole = study_rows(read_rows(document, Programs())), study_blackhole()
    for report in (study_report(study), blackhole_report(blackhole)):
        out().print(report, soft_wrap=True, markup=False, highlight=False)
    sources = {
        Path(perf_constants.__file__): wormhole_source(study),
        Path(perf_blackhole.__file__): blackhole_source(blackhole),
    }
    if options.write:
        for path, source in sources.items():
            replace_source(path, source)
    elif not all(is_kept(path, source) for path, source in sources.items()):
        err().print("the constants kept are not these; --write keeps them", style="yellow")
        return EXIT_STALE
    return 0


def wormhole_source(study: Any) -> str:
    """Return the source lines of a `Study`: constants and error bars."""
    bars = "".join(
        f'    "{name}": ({step:.3f}, {prompt:.3f}),\n'
        for name, (step, prompt) in study.bars().items()
    )
    return f"FITTED = {_constants_source(study.constants)}\nERROR_BARS = {{\n{bars}}}\n"


def blackhole_source(study: Any) -> str:
    """Return the source lines of a `BlackholeStudy`: constants and error bars."""
    step, prompt = study.bars()
    bars = f"BLACKHOLE_BARS = ({step:.3f}, {prompt:.3f})"
    return f"BLACKHOLE = {_constants_source(study.constants)}\n{bars}\n"


def _constants_source(constants: Any) -> str:
    lines = "".join(
        f"    {field.name}={getattr(constants, field.name):.4g},\n"
        for field in dataclasses.fields(constants)
    )
    return f"{type(constants).__name__}(\n{lines})".replace("e+", "e")  # as ruff formats it


def is_kept(path: Path, made: str) -> bool:
    """Return whether the text between the marks of a file has equal names and close numbers."""
    kept = path.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    if _NUMBER.sub("", kept) != _NUMBER.sub("", made):
        return False
    pairs = zip(*(map(float, _NUMBER.findall(text)) for text in (kept, made)), strict=True)
    return all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in pairs)


def replace_source(path: Path, made: str) -> None:
    """Put text between the marks of a source file.

    Raises:
        ConfigError: if the file cannot be read or written, or has no marks.
    """
    before, mark, rest = read_text(path).partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not mark or not end:
        raise ConfigError(f"{path}: no lines {_BEGIN.strip()!r} and {_END.strip()!r}")
    write_file(path, f"{before}{mark}{made}{end}{after}".encode())
