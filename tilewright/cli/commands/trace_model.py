"""``tilewright trace``: accuracy loss by layer and operation."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.precision import PrecisionConfig, list_precisions, load_precision
from tilewright.compiler.precision.names import ALLOWED_FORMATS
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.prompts import accuracy_text
from tilewright.models import calibrated_precision, check_header, find_model
from tilewright.options.arguments import integer, option, parse, real
from tilewright.utils.json_lines import check_writable

CHECK_TEXT = "held-out"
"""Text to compare a selection of cache formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceArgs:
    model: str | None = option(
        "checkpoint, or calibrated folder (default: smollm2)", "model", nargs="?"
    )
    precision: str | None = option(
        "configuration to trace (default: performance, or that of a calibrated folder)",
        metavar="NAME",
    )
    reference: str | None = option(
        "checkpoint with the fp32 values, if not the model itself", metavar="PATH"
    )
    target: str | None = option(
        "restore KV format, activation format and fidelity of the whole model on this target, too",
        metavar="NAME",
    )
    text: str | None = option("accuracy, held-out, long or a text file", metavar="NAME|FILE")
    tokens: int = option("number of positions", default=256, type=integer(16, 8192), metavar="N")
    fast: bool = option("errors of operations only: restore nothing", default=False)
    top: int = option("number of rows in the table", default=20, type=integer(1, 100_000))
    as_json: bool = option("print the trace as JSON", "--json", default=False)
    plot: str | None = option("write NAME.svg and NAME.png: the errors by layer", metavar="NAME")
    cache_formats: tuple[str, ...] = option(
        "instead of a trace, select the formats of keys and values in each layer",
        default=(),
        nargs="+",
        choices=ALLOWED_FORMATS["kv_cache"],
    )
    max_kl: float | None = option(
        "with --cache-formats: KL bound against an unrounded cache, in nats",
        type=real(0, 100),
        metavar="NATS",
    )
    output: str | None = option(
        "with --cache-formats: YAML of the selection", "-o", "--output", metavar="FILE"
    )


def main(argv: list[str]) -> int:
    """Run ``tilewright trace`` with its arguments. Return the exit code."""
    options = parse(
        _TraceArgs,
        argv,
        prog="tilewright trace",
        description="Find the layers, operations and settings that lose accuracy.",
    )
    found = find_model(options.model)
    check_header(found)
    own = calibrated_precision(found)
    if own is not None and options.reference is None:
        raise ConfigError(f"{found}: calibrated weights; allowed: with --reference ORIGINAL")
    configuration = options.precision or own or "performance"
    precision = load_precision(configuration)
    text = accuracy_text(options.text or "accuracy").content
    _check(options, configuration)
    warnings.filterwarnings("ignore", module="torch")
    return _run(options, found, precision, text)


def _check(options: _TraceArgs, configuration: str) -> None:
    """Check the options of a selection, and the files to write.

    Raises:
        ConfigError: for conflicting options, or a configuration that no file can inherit.
    """
    if options.plot is not None:
        check_writable(Path(options.plot))
    if not options.cache_formats:
        if options.max_kl is not None or options.output is not None:
            raise ConfigError("--max-kl or --output; allowed: with --cache-formats")
        return
    if options.max_kl is None or options.output is None:
        raise ConfigError("--cache-formats; allowed: with --max-kl and --output FILE")
    if options.as_json or options.fast or options.plot or options.target:
        raise ConfigError(
            "--cache-formats with --json, --fast, --plot or --target; allowed: without them"
        )
    if configuration not in list_precisions():
        raise ConfigError(
            f"--precision {configuration[:60]!r}: the selection inherits it; allowed: a "
            "configuration of precision_cfgs/"
        )
    if options.text == CHECK_TEXT:
        raise ConfigError(f"--text {CHECK_TEXT}: checks the selection; allowed: another text")
    check_writable(Path(options.output))


def _run(options: _TraceArgs, found: Path, precision: PrecisionConfig, text: str) -> int:
    """Trace, then print the table or JSON."""
    from tilewright.cli.terminal.console import compile_progress, err, note, out, print_table
    from tilewright.compiler.calibration.forward import sequences
    from tilewright.compiler.targets.table import get_target
    from tilewright.evaluate.tracing.layer_trace import trace
    from tilewright.evaluate.tracing.report import plot_trace, trace_table
    from tilewright.evaluate.tracing.settings import restored_settings
    from tilewright.models import load_model

    if options.target is not None:
        get_target(options.target)
    model = load_model(found)
    original = None if options.reference is None else load_model(find_model(options.reference))
    ids = model.tokenizer.encode(text)
    if options.tokens > (most := min(len(ids), model.config.max_positions)):
        raise ConfigError(f"--tokens {options.tokens}; allowed by text and model: up to {most}")
    tokens = sequences(ids, options.tokens, options.tokens)
    if options.cache_formats:
        from tilewright.cli.commands.select_cache import select

        assert options.max_kl is not None and options.output is not None
        names = tuple(dict.fromkeys(options.cache_formats))
        return select(
            model,
            original or model,
            precision,
            tokens,
            names=names,
            max_kl=options.max_kl,
            output=Path(options.output),
            check_text=CHECK_TEXT,
        )
    with compile_progress(err()) as progress:
        how: Any = {"original": original, "restores": not options.fast, "progress": progress}
        traced = trace(model, precision, tokens, **how)
        if (target := options.target) is not None:
            truth = original or model
            more = restored_settings(model, precision, tokens, target, truth, progress)
            traced = dataclasses.replace(traced, rows=(*more, *traced.rows))
    if options.plot is not None:
        plot_trace(traced, Path(options.plot), f"{model.name}, {precision.name}")
    if options.as_json:
        print(json.dumps(dataclasses.asdict(traced)))
        return 0
    title = f"{model.name}, {precision.name}: top-1 {100 * traced.top1:.1f} %, KL {traced.kl:.4f}"
    print_table(out(), title, trace_table(traced, options.top), numbers=True)
    note(err(), f"{traced.num_positions} positions; weights in float arithmetic; worst first")
    return 0
