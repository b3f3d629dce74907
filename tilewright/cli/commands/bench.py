"""``tilewright bench``: measures a model from its path to generated text."""

from __future__ import annotations

import warnings

from tilewright.cli.arguments.ask import ModelStatusLine
from tilewright.cli.arguments.bench import RunOptions, read_options
from tilewright.cli.commands import bench_serve, nodes
from tilewright.compiler.devices import BOARDS
from tilewright.compiler.precision import list_precisions
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import CASES


def main(argv: list[str]) -> int:
    """Run ``tilewright bench`` with its arguments and return the exit code."""
    if any(word.partition("=")[0] == "--url" for word in argv):
        return bench_serve.main(argv)
    if nodes.has_options(argv):
        return nodes.main(argv, prog="tilewright bench --nodes")
    sign = ModelStatusLine()
    try:
        options = read_options(argv, sign)
    finally:
        sign.clear()
    if options is None:
        _print_list()
        return 0
    return run(options)


def run(options: RunOptions) -> int:
    """Open and measure the model. Without the target's device, emulate and predict."""
    sign = ModelStatusLine()
    sign.opening(options.model.path)
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.api import load
    from tilewright.cli.measure import measure
    from tilewright.cli.measure.on_device import run_here
    from tilewright.cli.measure.originals import with_original
    from tilewright.cli.terminal.console import err, note, out

    screen = err() if options.as_json else out()
    try:
        source = load(options.model.path, use_cache=options.model.config.use_cache)
        source = with_original(source, options)
    finally:
        sign.clear()
    note(err(), *source.notes)
    if measure.is_emulated(source, options):
        if options.model.config.speculative_config is not None:
            raise ConfigError(
                "--speculative-config with an emulated board: it verifies no drafts; allowed: "
                "cpu or cuda"
            )
        from tilewright.cli.measure.on_board import run_board

        return run_board(source, options, screen)
    if options.explain_time:
        raise ConfigError(
            f"--explain-time with target {options.model.target}: only "
            f"Tenstorrent boards have a time model; allowed: --target {', '.join(BOARDS)}"
        )
    return run_here(source, options, screen)


def _print_list() -> None:
    from tilewright.cli.terminal.console import out, print_table
    from tilewright.evaluate.report.table import Table

    cases = [(case.name, case.description) for case in CASES.values()]
    print_table(out(), "cases (--case)", Table.of(("name", "what it runs"), cases))
    precisions = Table.of(("name", "what it is"), list_precisions().items())
    print_table(out(), "configurations (--precision)", precisions)
