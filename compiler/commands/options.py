"""What ``tilewright run`` is asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright.compiler.bench.cases import ACCURACY_TEXT, CASES, DEFAULT_CASE, Case
from tilewright.compiler.bench.prompts import (
    AccuracyText,
    Prompt,
    accuracy_text,
    bench_text,
    read_prompts,
    sample_prompts,
)
from tilewright.compiler.bench.results import check_writable
from tilewright.compiler.commands.arguments import (
    ModelOptions,
    Parser,
    add_model_options,
    integer,
    read_model_options,
    real,
)
from tilewright.compiler.errors import ConfigError

DEFAULT_RESULTS = "results/results.jsonl"
_MAX_BATCH = 256


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A checked command line: the case with the user's changes, and everything around it.

    ``is_case_changed`` also where its accuracy is measured on another text.
    """

    case: Case
    is_case_changed: bool
    model: ModelOptions
    prompts: tuple[Prompt, ...]
    text: str
    accuracy_text: AccuracyText
    temperature: float
    top_k: int
    top_p: float
    seed: int
    threads: int | None
    use_cache: bool
    results: Path | None
    explain: bool
    explain_time: bool
    as_json: bool


def parser() -> argparse.ArgumentParser:
    """The options of ``tilewright run`` and ``demo/simple_text_demo.py``."""
    found = Parser(prog="tilewright run", description="Answer prompts with a model; measure it.")
    found.add_argument("--case", default=DEFAULT_CASE, help=f"a named case ({DEFAULT_CASE})")
    found.add_argument("--list", action="store_true", help="list the cases and configurations")
    found.add_argument("--explain", action="store_true", help="print the effective precision")
    found.add_argument(
        "--explain-time", action="store_true", help="print where a step goes, predicted (boards)"
    )
    add_model_options(found)
    found.add_argument("--threads", type=integer(1, 1024), help="CPU threads (default: all cores)")
    found.add_argument("--no-cache", action="store_true", help="compile anew and keep nothing")
    asked = found.add_argument_group("prompts")
    asked.add_argument("--prompt", help="one prompt; - reads it from standard input")
    asked.add_argument("--input-prompts", metavar="FILE", help="a JSON list of {prompt: ...}")
    asked.add_argument("--batch-size", type=integer(1, _MAX_BATCH), help="users served at once")
    asked.add_argument("--max-generated-tokens", type=integer(1, 1 << 20), metavar="N")
    choice = found.add_argument_group("sampling")
    choice.add_argument("--temperature", type=real(0, 100), default=0.0, help="0: greedy")
    choice.add_argument("--top-k", type=integer(0, (1 << 31) - 1), default=0, help="0: off")
    choice.add_argument("--top-p", type=real(0, 1, above=True), default=1.0)
    choice.add_argument("--seed", type=integer(0, (1 << 63) - 1), default=0)
    choice.add_argument("--stop-at-eos", action=argparse.BooleanOptionalAction, default=None)
    taken = found.add_argument_group("measuring")
    taken.add_argument("--repeat-batches", type=integer(1, 10_000), metavar="N")
    taken.add_argument(
        "--token-accuracy",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="top-1 and top-5 against the fp32 reference, teacher-forced",
    )
    taken.add_argument(
        "--accuracy-text",
        metavar="NAME|FILE",
        help=f"what it is measured on: accuracy, held-out, long or a text file ({ACCURACY_TEXT})",
    )
    taken.add_argument("--results", metavar="FILE", default=DEFAULT_RESULTS, help="JSON lines")
    taken.add_argument("--no-results", action="store_true", help="record nothing")
    taken.add_argument("--json", action="store_true", help="print only the result, as JSON")
    return found


def read_options(argv: Sequence[str]) -> RunOptions | None:
    """The checked command line; None for ``--list``.

    Raises:
        TilewrightError: for anything that can be seen to be wrong without the model.
    """
    arguments = parser().parse_args(list(argv))
    if arguments.list:
        return None
    named = CASES[arguments.case]
    prompts = _user_prompts(arguments)
    case = _changed_case(named, arguments, prompts)
    text = "" if case.is_natural else bench_text(case.prompts)
    if case.is_natural and not prompts:
        prompts = tuple(sample_prompts(case.prompts))
    accuracy_on = _accuracy_text(arguments.accuracy_text, case)
    results = None if arguments.no_results else Path(arguments.results)
    if results is not None:
        check_writable(results)
    return RunOptions(
        case=case,
        is_case_changed=case != named or not accuracy_on.is_standard,
        model=read_model_options(arguments, named.precision),
        prompts=prompts,
        text=text,
        accuracy_text=accuracy_on,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        threads=arguments.threads,
        use_cache=not arguments.no_cache,
        results=results,
        explain=arguments.explain,
        explain_time=arguments.explain_time,
        as_json=arguments.json,
    )


def _accuracy_text(wanted: str | None, case: Case) -> AccuracyText:
    if wanted is None:
        return accuracy_text()
    if not case.token_accuracy:
        raise ConfigError(
            "--accuracy-text without --token-accuracy; allowed: both, or a case that measures "
            f"accuracy, as {case.precision}-top-1"
        )
    return accuracy_text(wanted)


def _user_prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    if arguments.prompt is not None and arguments.input_prompts is not None:
        raise ConfigError("--prompt and --input-prompts; allowed: one of them")
    if arguments.input_prompts is not None:
        return tuple(read_prompts(arguments.input_prompts))
    if arguments.prompt is None:
        return ()
    text = _standard_input() if arguments.prompt == "-" else arguments.prompt
    if not text.strip():
        raise ConfigError("the prompt is empty; allowed: some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not valid UTF-8; allowed: UTF-8 text") from None
    return (Prompt(text),)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text"
        ) from None


def _changed_case(named: Case, arguments: argparse.Namespace, prompts: tuple[Prompt, ...]) -> Case:
    """The named case with what the command line says instead."""
    wanted = {
        "batch_size": arguments.batch_size,
        "max_generated_tokens": arguments.max_generated_tokens,
        "stop_at_eos": arguments.stop_at_eos,
        "num_repeats": arguments.repeat_batches,
        "token_accuracy": arguments.token_accuracy,
    }
    if prompts:
        wanted["batch_size"] = arguments.batch_size or len(prompts)
        if not len(prompts) <= wanted["batch_size"] <= _MAX_BATCH:
            raise ConfigError(
                f"{len(prompts)} prompts and a batch size of {wanted['batch_size']}; allowed: "
                f"at most one prompt a user, and {_MAX_BATCH} users"
            )
        if not named.is_natural:
            return replace(
                named,
                prompts="",
                prompt_length=None,
                **{key: value for key, value in wanted.items() if value is not None},
            )
    return replace(named, **{key: value for key, value in wanted.items() if value is not None})
