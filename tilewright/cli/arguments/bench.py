"""``tilewright bench`` options, checked before any heavy import."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.sampling import SamplingOptions
from tilewright.compiler.sampling.params import SamplingParams, sampling_of
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_TEXT, CASES, DEFAULT_CASE, Case
from tilewright.evaluate.cases.prompts import (
    AccuracyText,
    BenchPrompt,
    accuracy_text,
    bench_text,
    read_prompts,
    sample_prompts,
)
from tilewright.options.arguments import (
    OnOff,
    Parser,
    add_options,
    integer,
    names_of,
    option,
    read_prompt,
    values_of,
)
from tilewright.options.config_file import (
    ConfigArguments,
    PathArguments,
    read_config,
    with_config,
)
from tilewright.options.engine_config import MODEL, RANKS, SINGLE, EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve
from tilewright.utils.json_lines import check_writable

if TYPE_CHECKING:
    from tilewright.cli.arguments.ask import ModelStatusLine

DEFAULT_RESULTS = Path("results/results.jsonl")
_MAX_BATCH = 256
_ENGINE = (*names_of(EngineConfig, MODEL, RANKS), "num_threads", "use_cache", "speculative_config")
"""Engine fields without a value in a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchArgs:
    """Selection of the case, prompts and text."""

    case: str = option(f"named case (default: {DEFAULT_CASE})", default=DEFAULT_CASE)
    list: bool = option("list the cases and configurations", default=False)
    prompt: str | None = option("a prompt, or - for standard input", group="prompts")
    input_prompts: str | None = option(
        "JSON list of {prompt: ...}", group="prompts", metavar="FILE"
    )
    accuracy_text: str | None = option(
        f"text for accuracy: accuracy, held-out, long or a text file (default: {ACCURACY_TEXT})",
        group="measuring",
        metavar="NAME|FILE",
    )
    no_results: bool = option("record no result", default=False, group="measuring")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaseChanges:
    """Case field changes, by the field's name. None keeps the case's value."""

    batch_size: int | None = option(
        "concurrent users", group="prompts", type=integer(1, _MAX_BATCH)
    )
    max_generated_tokens: int | None = option(
        "output tokens per prompt", group="prompts", type=integer(1, 1 << 20), metavar="N"
    )
    stop_at_eos: bool | None = option(
        "stop an output at an end token", group="prompts", action=OnOff
    )
    num_repeats: int | None = option(
        "repeats for the whole batch",
        "--repeat-batches",
        group="measuring",
        type=integer(1, 10_000),
        metavar="N",
    )
    token_accuracy: bool | None = option(
        "measure teacher-forced top-1 and top-5 against the fp32 reference",
        group="measuring",
        action=OnOff,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The checked command line: the case with the user's changes, and the options of the run.

    Attributes:
        command: the command as typed, without the options for output.
        is_case_changed: whether a field or the accuracy text differs from the named case.
    """

    command: str

    case: Case
    is_case_changed: bool
    model: ResolvedConfig
    sampling: SamplingParams
    prompts: tuple[BenchPrompt, ...]
    text: str
    accuracy_text: AccuracyText
    explain: bool = option(
        "print the effective precision, the numeric contract, bytes by group and every repeat",
        default=False,
    )
    verbose: bool = option("print the compiler's notes", "-v", "--verbose", default=False)
    explain_time: bool = option("print the predicted step time by part (boards)", default=False)
    results: Path | None = option(
        f"JSON lines file for the result (default: {DEFAULT_RESULTS})",
        default=DEFAULT_RESULTS,
        group="measuring",
        metavar="FILE",
        type=Path,
    )
    reference: str | None = option(
        "checkpoint for the accuracy reference, as the original of a calibrated directory",
        group="measuring",
        metavar="PATH",
    )
    as_json: bool = option(
        "print the result only, as JSON", "--json", default=False, group="measuring"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``tilewright bench`` and ``demo/simple_text_demo.py``."""
    found = Parser(
        prog="tilewright bench",
        description="Measure a model on prompts, or a server with --url URL. Other options: "
        "tilewright bench --url URL --help (load tests), "
        "tilewright bench --nodes --help (distributed-llama).",
    )
    add_options(found, PathArguments, ConfigArguments, _BenchArgs, _CaseChanges, RunOptions)
    add_options(found, SamplingOptions, without=("max_tokens",))
    add_options(found, EngineConfig, only=_ENGINE)
    return found


def read_options(argv: Sequence[str], sign: ModelStatusLine | None = None) -> RunOptions | None:
    """Return the checked command line, or None for ``--list``.

    ``sign`` shows the first progress line after parsing, before any file is read.

    Raises:
        TilewrightError: for every mistake that is visible without the model.
    """
    reader = parser()
    argv = with_config(reader, argv)
    arguments = reader.parse_args(argv)
    if arguments.list:
        return None
    config = read_config(arguments, SINGLE)
    if sign is not None:
        sign.opening(config.model)
    named = CASES[arguments.case]
    prompts = _user_prompts(arguments)
    case = _changed_case(named, values_of(_CaseChanges, arguments), prompts)
    text = "" if case.is_natural else bench_text(case.prompts)
    if case.is_natural and not prompts:
        prompts = tuple(sample_prompts(case.prompts))
    accuracy_on = _accuracy_text(arguments.accuracy_text, case)
    given = values_of(RunOptions, arguments)
    sampling = values_of(SamplingOptions, arguments)
    if arguments.no_results:
        given["results"] = None
    else:
        check_writable(given["results"])
    return RunOptions(
        case=case,
        is_case_changed=case != named
        or not accuracy_on.is_standard
        or config.speculative_config is not None,
        model=resolve(config, default=named.precision),
        sampling=sampling_of({name: v for name, v in sampling.items() if v is not None}),
        prompts=prompts,
        text=text,
        accuracy_text=accuracy_on,
        command=_command(argv),
        **given,
    )


_NOT_RECORDED = ("--json", "--no-results", "--use-cache", "--no-use-cache", "--no-cache")


def _command(argv: Sequence[str]) -> str:
    words = [word for word in argv if word not in _NOT_RECORDED]
    for index in range(len(words) - 1, -1, -1):
        if words[index] == "--results":
            del words[index : index + 2]
        elif words[index].startswith("--results="):
            del words[index]
    return shlex.join(["tilewright", "bench", *words])


def _accuracy_text(wanted: str | None, case: Case) -> AccuracyText:
    if wanted is None:
        return accuracy_text()
    if not case.token_accuracy:
        raise ConfigError(
            "--accuracy-text without --token-accuracy; allowed: both, or a case that measures "
            f"accuracy, as {case.precision}-top-1"
        )
    return accuracy_text(wanted)


def _user_prompts(arguments: argparse.Namespace) -> tuple[BenchPrompt, ...]:
    if arguments.prompt is not None and arguments.input_prompts is not None:
        raise ConfigError("--prompt and --input-prompts; allowed: one of them")
    if arguments.input_prompts is not None:
        return tuple(read_prompts(arguments.input_prompts))
    if arguments.prompt is None:
        return ()
    return (BenchPrompt(read_prompt(arguments.prompt)),)


def _changed_case(named: Case, given: dict[str, Any], prompts: tuple[BenchPrompt, ...]) -> Case:
    """Return the named case with the command line's changes."""
    wanted = {name: value for name, value in given.items() if value is not None}
    if prompts:
        batch = wanted.setdefault("batch_size", len(prompts))
        if not len(prompts) <= batch <= _MAX_BATCH:
            raise ConfigError(
                f"{len(prompts)} prompts and a batch size of {batch}; allowed: "
                f"at most one prompt a user, and {_MAX_BATCH} users"
            )
        if not named.is_natural:
            wanted |= {"prompts": "", "prompt_length": None}
    return replace(named, **wanted)
