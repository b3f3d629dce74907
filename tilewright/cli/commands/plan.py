"""``tilewright plan``: Tenstorrent boards and configurations for a model."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError
from tilewright.models import check_header, find_model_or_shape
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.json_lines import check_writable

_CONTEXT = 2048
"""Default positions per user."""
_SPEED_COLUMNS = (
    *("model", "board", "length", "CI target (t/s/u)", "predicted (t/s/u)"),
    *("CI target (ms)", "predicted (ms)"),
)
_ACCURACY_COLUMNS = (
    *("model", "board", "CI target, top-1 (%)", "emulated top-1 (%)"),
    *("CI target, top-5 (%)", "emulated top-5 (%)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EstimateArgs:
    model: str | None = option("checkpoint, or shape:NAME (default: smollm2)", "model", nargs="?")
    boards: str | None = option(
        "boards to compare, separated by commas (default: all)", metavar="LIST"
    )
    precision: str = option(
        "configurations to compare, separated by commas",
        default="performance,accuracy",
        metavar="LIST",
    )
    users: int = option("concurrent users", default=1, type=integer(1, 32))
    context: int | None = option(
        "positions per user (default: 2048, or all positions of a smaller model)",
        type=integer(32),
        metavar="N",
    )
    prompt: int = option("prompt tokens", default=128, type=integer(1), metavar="N")
    accuracy: int = option(
        "positions to emulate for top-1 (0: none)", default=0, type=integer(0, 4096), metavar="N"
    )
    layers: int = option(
        "layers in the emulated copy (0: all)", default=4, type=integer(0), metavar="N"
    )
    targets: str | None = option(
        "model_targets.yaml from tt-metal to compare the predictions with", metavar="FILE"
    )
    write_targets: str | None = option(
        "write the predictions as a model_targets.yaml", metavar="FILE"
    )
    write_overrides: str | None = option(
        "write the first configuration as weight_dtype_overrides for tt-xla", metavar="FILE"
    )
    as_json: bool = option("print JSON instead of a table", "--json", default=False)


def main(argv: list[str]) -> int:
    """Run ``tilewright plan`` with its arguments. Return the exit code."""
    options = parse(
        _EstimateArgs,
        argv,
        prog="tilewright plan",
        description="Compare Tenstorrent boards for a model: memory, predicted speed, emulated "
        "accuracy.",
    )
    found = find_model_or_shape(options.model)
    check_header(found)
    if options.context is not None:
        _check_prompt(options.prompt, options.context)
    from tilewright.evaluate.board_comparison import read_boards
    from tilewright.evaluate.model_targets import read_targets

    boards = read_boards(options.boards)
    for path in (options.write_targets, options.write_overrides):
        if path is not None:
            check_writable(Path(path))
    names = dict.fromkeys(name.strip() for name in options.precision.split(","))
    precisions = {(item := load_precision(name)).name: item for name in names}
    warnings.filterwarnings("ignore", module="torch")

    from tilewright.cli.terminal.console import compile_progress, err
    from tilewright.evaluate.board_comparison import Workload, compare_boards, with_accuracy
    from tilewright.evaluate.cases.prompts import accuracy_text
    from tilewright.models import load_model

    model = load_model(found)
    max_positions = model.config.max_positions
    context = min(_CONTEXT, max_positions) if options.context is None else options.context
    if context > max_positions:
        raise ConfigError(f"--context {context}; allowed by {model.name}: up to {max_positions}")
    _check_prompt(options.prompt, context)
    targets = None if options.targets is None else read_targets(Path(options.targets), model.name)
    if options.accuracy and model.weights == "random":
        raise ConfigError(f"--accuracy of {model.name}: random weights; allowed: a checkpoint")
    size = Workload(users=options.users, context=context, prompt=options.prompt)
    with compile_progress(err()) as progress:
        rows = compare_boards(model, list(precisions.values()), boards, size, progress)
        if options.accuracy:
            tokens = model.tokenizer.encode(accuracy_text("accuracy").content)[: options.accuracy]
            rows = with_accuracy(rows, model, precisions, tokens, options.layers, progress)
    _write_files(options, model, precisions, rows)
    if options.as_json:
        print(json.dumps([_as_json(candidate, targets) for candidate in rows]))
    else:
        _print(rows, targets, size)
    return 0


def _check_prompt(prompt: int, context: int) -> None:
    if prompt > context:
        raise ConfigError(f"--prompt {prompt}; allowed: up to --context {context}")


def _as_json(candidate: Any, targets: Any) -> dict[str, Any]:
    """Return a candidate as JSON, with the CI targets of its board."""
    result = dataclasses.asdict(candidate)
    if targets is not None:
        result["ci_targets"] = [
            dataclasses.asdict(target) for target in targets if target.board == candidate.board
        ]
    return result


def _print(rows: Any, targets: Any, size: Any) -> None:
    """Print the candidates, their notes, and the CI targets."""
    from tilewright.cli.terminal.console import err, note, out
    from tilewright.evaluate.board_comparison import markdown_of

    out().print(markdown_of(rows), soft_wrap=True, markup=False)
    note(err(), f"users {size.users}, context {size.context}, prompt {size.prompt}")
    note(err(), "speed is predicted, accuracy is emulated on a single chip; prices are left out")
    if any(candidate.tsu is not None and candidate.tsu_error is None for candidate in rows):
        words = "without an error bar: an extrapolation, no published speed of its kind was fitted"
        note(err(), words)
    if any(candidate.accuracy and candidate.accuracy.is_estimate for candidate in rows):
        note(
            err(), "top-1 is an estimate from a shallow copy, usually too high for the whole model"
        )
    _print_targets(targets, rows, size.users)


def _write_files(options: _EstimateArgs, model: Any, precisions: Any, rows: Any) -> None:
    """Write the vendor's files. Print the settings that a file cannot express."""
    from tilewright.cli.terminal.console import err, note
    from tilewright.compiler.driver import resolve_precision
    from tilewright.compiler.precision.weight_overrides import weight_overrides
    from tilewright.compiler.tracer import grouped_modules
    from tilewright.evaluate.model_targets import targets_text
    from tilewright.utils.files import write_file

    if options.write_targets is not None:
        text = targets_text(model.name, rows, users=options.users, prompt=options.prompt)
        write_file(Path(options.write_targets), text.encode())
    if options.write_overrides is not None:
        precision = resolve_precision(model, next(iter(precisions.values())))
        entries, dropped = weight_overrides(precision, grouped_modules(model.module))
        write_file(Path(options.write_overrides), (json.dumps(entries, indent=2) + "\n").encode())
        note(err(), f"{options.write_overrides}: formats only; dropped: {', '.join(dropped)}")


def _print_targets(targets: Any, rows: Any, users: int) -> None:
    """Print the CI targets for the planned boards and users with the predictions."""
    from tilewright.cli.terminal.console import err, note, out, print_table
    from tilewright.evaluate.report.table import Table

    if targets is None:
        return
    candidates = {
        candidate.board: candidate for candidate in reversed(rows) if not candidate.refused
    }
    speeds, accuracies = [], []
    for target in targets:
        candidate = candidates.get(target.board)
        if candidate is None:
            continue
        where = target.model, target.board
        has_speed = target.tsu is not None or target.ttft_ms is not None
        if has_speed and target.users == users:
            decode = _compared(target.tsu, target.tolerance, candidate.tsu)
            first = _compared(target.ttft_ms, target.ttft_tolerance, candidate.ttft_ms)
            speeds.append((*where, str(target.length or "-"), *decode, *first))
        if target.top1 is not None or target.top5 is not None:  # equal for any number of users
            found = candidate.accuracy
            is_whole = found is not None and not found.is_estimate
            top1 = _percent(target.top1), _percent(100 * found.top1 if is_whole else None)
            top5 = _percent(target.top5), _percent(100 * found.top5 if is_whole else None)
            accuracies.append((*where, *top1, *top5))
    if not speeds and not accuracies:
        note(err(), f"no active CI target of these boards with {users} users")
    for title, columns, cells in (
        ("CI targets, not measurements", _SPEED_COLUMNS, speeds),
        ("CI targets of accuracy", _ACCURACY_COLUMNS, list(dict.fromkeys(accuracies))),
    ):
        if cells:
            print_table(out(), title, Table.of(columns, cells), numbers=True)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _compared(target: float | None, tolerance: float, predicted: float) -> tuple[str, str]:
    """Return a CI target with its tolerance, and the prediction."""
    if target is None:
        return "-", "-"
    return f"{target:,.1f} ± {100 * tolerance:.0f} %", f"{predicted:,.1f}"
