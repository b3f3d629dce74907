"""``tilewright plan``: Tenstorrent boards and configurations for a model."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass

from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError
from tilewright.models import check_header, find_model_or_shape
from tilewright.options.arguments import integer, option, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
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
    context: int = option("positions of a user", default=2048, type=integer(32), metavar="N")
    prompt: int = option("tokens of a prompt", default=128, type=integer(1), metavar="N")
    accuracy: int = option(
        "positions to emulate for top-1 (0: none)", default=0, type=integer(0, 4096), metavar="N"
    )
    layers: int = option(
        "layers of the emulated copy (0: all)", default=4, type=integer(0), metavar="N"
    )
    as_json: bool = option("print JSON instead of a table", "--json", default=False)


def main(argv: list[str]) -> int:
    """Run ``tilewright plan`` with its arguments. Return the exit code."""
    options = parse(
        _Options,
        argv,
        prog="tilewright plan",
        description="Compare Tenstorrent boards for a model: memory, predicted speed, emulated "
        "accuracy.",
    )
    found = find_model_or_shape(options.model)
    check_header(found)
    if options.prompt > options.context:
        raise ConfigError(f"--prompt {options.prompt}; allowed: up to --context {options.context}")
    from tilewright.evaluate.board_plan import read_boards

    boards = read_boards(options.boards)
    names = dict.fromkeys(name.strip() for name in options.precision.split(","))
    precisions = {(each := load_precision(name)).name: each for name in names}
    warnings.filterwarnings("ignore", module="torch")

    from tilewright.cli.terminal.console import compile_progress, err, note, out
    from tilewright.evaluate.board_plan import PlanSize, plan_boards, plan_table, with_accuracy
    from tilewright.evaluate.cases.prompts import accuracy_text
    from tilewright.models import load_model

    model = load_model(found)
    if options.accuracy and model.weights == "random":
        raise ConfigError(f"--accuracy of {model.name}: random weights; allowed: a checkpoint")
    size = PlanSize(users=options.users, context=options.context, prompt=options.prompt)
    with compile_progress(err()) as progress:
        rows = plan_boards(model, list(precisions.values()), boards, size, progress)
        if options.accuracy:
            tokens = model.tokenizer.encode(accuracy_text("accuracy").content)[: options.accuracy]
            rows = with_accuracy(rows, model, precisions, tokens, options.layers, progress)
    if options.as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return 0
    out().print(plan_table(rows).markdown().rstrip("\n"), soft_wrap=True, markup=False)
    note(err(), "speed is predicted, accuracy is emulated on a single chip; prices are left out")
    if any(row.accuracy and row.accuracy.layers < row.accuracy.all_layers for row in rows):
        note(err(), "top-1 is of a shallow copy: an estimate, higher than that of the whole model")
    return 0
