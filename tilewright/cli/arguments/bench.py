"""What ``tilewright bench`` is asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    real,
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
    from tilewright.cli.arguments.ask import Sign

DEFAULT_RESULTS = Path("results/results.jsonl")
_MAX_BATCH = 256
_ENGINE = (*names_of(EngineConfig, MODEL, RANKS), "num_threads", "use_cache")
"""Fields of the engine that a case does not decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchArgs:
    """Which case, and what is said of it; the last fields are named as the case's that they set."""

    case: str = option(f"a named case ({DEFAULT_CASE})", default=DEFAULT_CASE)
    list: bool = option("list the cases and configurations", default=False)
    prompt: str | None = option("one prompt; - reads it from standard input", group="prompts")
    input_prompts: str | None = option(
        "a JSON list of {prompt: ...}", group="prompts", metavar="FILE"
    )
    accuracy_text: str | None = option(
        f"what it is measured on: accuracy, held-out, long or a text file ({ACCURACY_TEXT})",
        group="measuring",
        metavar="NAME|FILE",
    )
    no_results: bool = option("record nothing", default=False, group="measuring")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaseChanges:
    """What a command line may say of a case's fields of the same names; None leaves the case's."""

    batch_size: int | None = option(
        "users served at once", group="prompts", type=integer(1, _MAX_BATCH)
    )
    max_generated_tokens: int | None = option(
        "of every prompt", group="prompts", type=integer(1, 1 << 20), metavar="N"
    )
    stop_at_eos: bool | None = option(
        "end an answer at its end token", group="prompts", action=OnOff
    )
    num_repeats: int | None = option(
        "of the whole batch",
        "--repeat-batches",
        group="measuring",
        type=integer(1, 10_000),
        metavar="N",
    )
    token_accuracy: bool | None = option(
        "top-1 and top-5 against the fp32 reference, teacher-forced",
        group="measuring",
        action=OnOff,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A checked command line: the case with the user's changes, and everything around it.

    ``is_case_changed`` also where its accuracy is measured on another text. ``command``: what was
    asked for, as it would be typed, without where output goes.
    """

    command: str

    case: Case
    is_case_changed: bool
    model: ResolvedConfig
    prompts: tuple[BenchPrompt, ...]
    text: str
    accuracy_text: AccuracyText
    explain: bool = option(
        "print the effective precision, the numeric contract, bytes by group and every repeat",
        default=False,
    )
    verbose: bool = option("print the notes of the compiler", "-v", "--verbose", default=False)
    explain_time: bool = option("print where a step goes, predicted (boards)", default=False)
    temperature: float = option("0: greedy", default=0.0, group="sampling", type=real(0, 100))
    top_k: int = option("0: off", default=0, group="sampling", type=integer(0, (1 << 31) - 1))
    top_p: float = option("1: off, 0: greedy", default=1.0, group="sampling", type=real(0, 1))
    seed: int = option(
        "of the random choices", default=0, group="sampling", type=integer(0, (1 << 63) - 1)
    )
    results: Path | None = option(
        f"where it is recorded, as JSON lines ({DEFAULT_RESULTS})",
        default=DEFAULT_RESULTS,
        group="measuring",
        metavar="FILE",
        type=Path,
    )
    reference: str | None = option(
        "the checkpoint that accuracy is compared with: the original of a calibrated folder",
        group="measuring",
        metavar="PATH",
    )
    as_json: bool = option(
        "print only the result, as JSON", "--json", default=False, group="measuring"
    )


def parser() -> argparse.ArgumentParser:
    """The options of ``tilewright bench`` and ``demo/simple_text_demo.py``."""
    found = Parser(
        prog="tilewright bench",
        description="Measure a model on prompts, or a server with --url URL. Other options: "
        "tilewright bench --url URL --help (load tests of a server), "
        "tilewright bench --nodes --help (those of distributed-llama).",
    )
    add_options(found, PathArguments, ConfigArguments, _BenchArgs, _CaseChanges, RunOptions)
    add_options(found, EngineConfig, only=_ENGINE)
    return found


def read_options(argv: Sequence[str], sign: Sign | None = None) -> RunOptions | None:
    """The checked command line; None for ``--list``. ``sign`` shows life once it can be read,
    before files are looked at.

    Raises:
        TilewrightError: for anything that can be seen to be wrong without the model.
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
    if arguments.no_results:
        given["results"] = None
    else:
        check_writable(given["results"])
    return RunOptions(
        case=case,
        is_case_changed=case != named or not accuracy_on.is_standard,
        model=resolve(config, default=named.precision),
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
    """The named case with what the command line says instead."""
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
