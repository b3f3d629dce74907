"""``tilewright batch`` options, checked before any heavy import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.batch.dataset import MAX_TOKENS
from tilewright.batch.plain_rows import Asking
from tilewright.cli.arguments.sampling import SamplingOptions
from tilewright.distributed.grouping import Grouping
from tilewright.errors import ConfigError
from tilewright.options.arguments import (
    Parser,
    add_options,
    check_text,
    integer,
    option,
    values_of,
)
from tilewright.options.config_file import ConfigArguments, read_config, with_config
from tilewright.options.engine_config import ALWAYS, AUTO, BATCH, NEVER, EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve

RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchArgs:
    tokenizer: str | None = option(
        "directory with another tokenizer (default: the model's)", group="model", metavar="PATH"
    )
    input: str | None = option(
        "data set: JSON lines in OpenAI's batch format or with a prompt column, a JSON list of "
        "[prompt, prompt_len, output_len] or objects, or Parquet",
        "input",
        nargs="?",
        metavar="INPUT",
    )
    dataset: str | None = option("same as INPUT", metavar="FILE")
    output: str | None = option(
        "new file for the answers, in the input's format. A journal with the same name exists "
        "until the run is complete (default: discard answers, print statistics)",
        "-o",
        "--output",
        metavar="FILE",
    )
    prompt_column: str | None = option(
        "prompt column in plain rows (default: prompt)", group="rows", metavar="NAME"
    )
    answer_column: str = option(
        "name for the answer column", default="text", group="rows", metavar="NAME"
    )
    chat: bool = option("send plain texts as user messages", default=False, group="rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The checked command line of ``tilewright batch``.

    Attributes:
        argv: arguments as typed, with a configuration file's options.
        sampling: given sampling values by name.
    """

    argv: tuple[str, ...]
    model: ResolvedConfig
    tokenizer: Path | None
    input: Path | None
    output: Path | None
    asking: Asking
    is_plain: bool
    max_tokens: int | None
    seed: int
    sampling: Mapping[str, float]
    num_samples: int | None = option(
        "number of rows, drawn by --seed (default: all)",
        group="rows",
        type=integer(1, 1 << 30),
        metavar="N",
    )
    input_len: int | None = option(
        "random tokens per prompt, in place of INPUT",
        group="rows",
        type=integer(1, 1 << 24),
        metavar="N",
    )
    output_len: int | None = option(
        "tokens per answer, with --input-len",
        group="rows",
        type=integer(1, 1 << 24),
        metavar="N",
    )
    ignore_eos: bool = option(
        "generate past end tokens, for measurements", default=False, group="rows"
    )
    resume: bool = option("continue an interrupted run", default=False)
    unordered: bool = option("write rows in completion order", default=False)
    as_json: bool = option("print the statistics as JSON", "--json", default=False)
    verbose: bool = option("log the compiler's notes", "-v", "--verbose", default=False)
    engine_kind: str = option(
        "local: this process. ray: Ray Data distributes rows over actors on machine or cluster",
        "--engine",
        default="local",
        group="several engines",
        choices=("local", RAY),
    )
    actors: int = option(
        "number of engines, with --engine ray",
        default=1,
        group="several engines",
        type=integer(1, 4096),
    )

    @property
    def slots(self) -> int:
        """Return the maximum concurrent rows."""
        return self.model.config.num_seqs(self.model.target)[0]


def read_batch_options(argv: Sequence[str]) -> BatchOptions:
    """Read and check the command line of ``tilewright batch``.

    Raises:
        TilewrightError: for every mistake that is visible without model and data set.
    """
    parser = Parser(
        prog="tilewright batch",
        description="Answer all rows in a data set with the server's engine, without HTTP.",
    )
    add_options(parser, _BatchArgs, SamplingOptions, BatchOptions, ConfigArguments)
    add_options(parser, EngineConfig, defaults=BATCH)
    argv = with_config(parser, argv)
    arguments = parser.parse_args(argv)
    given = values_of(BatchOptions, arguments)
    source = _input(arguments, given)
    sampling = values_of(SamplingOptions, arguments)
    seed, max_tokens = sampling.pop("seed") or 0, sampling.pop("max_tokens")
    for name in ("prompt_column", "answer_column"):
        check_text(getattr(arguments, name) or "", f"--{name.replace('_', '-')}")
    if arguments.output is None and given["resume"]:
        raise ConfigError("--resume without --output; allowed: that of the run that was stopped")
    model = _for_batches(resolve(read_config(arguments)))
    if given["engine_kind"] == RAY:
        _check_actors(model.grouping)
    elif given["actors"] != 1:
        raise ConfigError(f"--actors {given['actors']} without Ray; allowed: --engine ray")
    return BatchOptions(
        argv=tuple(argv),
        model=model,
        tokenizer=None if arguments.tokenizer is None else Path(arguments.tokenizer),
        input=source,
        output=None if arguments.output is None else Path(arguments.output),
        asking=Asking(
            prompt_column=arguments.prompt_column or "prompt",
            answer_column=arguments.answer_column,
            is_chat=arguments.chat,
            max_tokens=max_tokens or MAX_TOKENS,
        ),
        is_plain=arguments.prompt_column is not None,
        max_tokens=max_tokens,
        seed=seed,
        sampling={name: value for name, value in sampling.items() if value is not None},
        **given,
    )


def _for_batches(model: ResolvedConfig) -> ResolvedConfig:
    """Fix batch size and invariance. ``auto`` invariance becomes ``never``."""
    num_seqs, _ = model.config.num_seqs(model.target)
    invariance = model.config.invariance(model.target, num_seqs)
    chosen = NEVER if invariance == AUTO else invariance
    assert chosen in (ALWAYS, NEVER)
    return model.changed(max_num_seqs=num_seqs, batch_invariant=chosen)


def _check_actors(grouping: Grouping) -> None:
    """Raise ConfigError for rank placement, because Ray places an actor's ranks."""
    if grouping.parallel.devices:
        raise ConfigError("--devices with --engine ray, which gives each actor GPUs of its own")
    if grouping.machines.count > 1 or grouping.place is not None:
        raise ConfigError(
            "--engine ray in a group that others start too; allowed: --tensor-parallel-size, the "
            "ranks of each actor on one machine"
        )


def _input(arguments: Any, given: Mapping[str, Any]) -> Path | None:
    """Return the data set's file, or None for random rows.

    Raises:
        ConfigError: without a data set, or with two.
    """
    if arguments.input is not None and arguments.dataset is not None:
        raise ConfigError("INPUT and --dataset; allowed: one of them")
    named = arguments.input or arguments.dataset
    lengths = [name for name in ("input_len", "output_len") if given[name] is not None]
    if named is None:
        if len(lengths) < 2 or given["num_samples"] is None:
            raise ConfigError(
                "no data set; allowed: INPUT, or --input-len, --output-len and --num-samples"
            )
        return None
    if lengths:
        option_name = lengths[0].replace("_", "-")
        raise ConfigError(f"--{option_name} with a data set, whose rows have their own lengths")
    return Path(named)
