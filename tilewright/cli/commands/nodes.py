"""``tilewright run --nodes`` and ``bench --nodes`` with the options of distributed-llama.

``--steps`` counts prompt tokens and output tokens, as distributed-llama does (`counted_steps`). A
task is a task of the competition: three prompts with given steps, on four nodes.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.measure.counted_steps import NodesTiming, Stepper
from tilewright.distributed.grouping import Grouping
from tilewright.errors import ConfigError
from tilewright.models import quantised_types
from tilewright.options.arguments import (
    Parser,
    add_options,
    integer,
    names_of,
    numbers,
    option,
    read_prompt,
    real,
    refuse_given,
    values_of,
)
from tilewright.options.engine_config import MODEL, SINGLE, EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve
from tilewright.utils.child_process import PYTHON
from tilewright.utils.environment import now
from tilewright.utils.files import read_text, write_file

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Executable
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.loading.source import ModelHandle

_SEED = 10_042_026
_WIRES = {"f32": "fp32", "q80": "q80", "bf16": "bf16"}
_STEPS, _POSITIONS = 256, 4096
_PROMPTS = {"short": 975, "long": 4000, "leaderboard": 6000}
"""Steps for each prompt of a task."""
_TASKS = {
    1: {"nodes": 4, "nthreads": 2, "max_seq_len": _POSITIONS},
    2: {"nodes": 4},
    3: {"nodes": 4},
}
"""Defaults of each task."""
_OF_NO_PROMPT = (
    "config",
    "path",
    "worker",
    "dump",
    "prompt",
    "steps",
    "port",
    "host",
    "task",
    "prompts",
    "output",
)
"""Options without a place in the script of a prompt."""
_INFERENCE, _WORKER = "inference", "worker"
_OWN_OPTIONS = frozenset(
    (
        *("--worker", "--workers", "--steps", "--nthreads", "--max-seq-len", "--topp"),
        *("--buffer-float-type", "--tokenizer", "--task", "--prompts", "--port", "--host"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodesArgs:
    config: EngineConfig
    path: str | None = option(
        "inference on rank 0 (default), or worker on another machine",
        "path",
        nargs="?",
        choices=(_INFERENCE, _WORKER),
        metavar="MODE",
    )
    worker: bool = option("run a worker on this machine, same as MODE worker", default=False)
    tokenizer: str | None = option(
        "dllama's .t file (default: in the directory of the model)", metavar="FILE"
    )
    prompt: str | None = option("text to continue, or - for standard input", metavar="TEXT")
    steps: int | None = option(
        "tokens of prompt and answer (default: 256, in a task 975, 4000 and 6000)",
        type=integer(1, 1 << 20),
    )
    nodes: int | None = option(
        "nodes on this machine, a process per node (default: 1, in a task 4)",
        type=integer(1, 64),
    )
    workers: tuple[str, ...] = option(
        "HOST:PORT for each worker on other machines", default=(), metavar="ADDRESS"
    )
    port: int = option("worker port", default=9999, type=integer(1, 65535))
    host: str = option("worker address", default="127.0.0.1")
    nthreads: int | None = option("threads per node", "--nthreads", type=integer(1, 1024))
    max_seq_len: int | None = option(
        "maximum positions (default: 4096, in tasks 2 and 3 at least their steps)",
        type=integer(1, 1 << 24),
    )
    buffer_float_type: str | None = option(
        "data type for partial sums between nodes (default: q80 for block formats, f32 with "
        "--compute exact, else bf16)",
        choices=tuple(_WIRES),
    )
    shares: tuple[int, ...] | None = option(
        "proportions per node, as 2,1,1", type=numbers, metavar="LIST"
    )
    temperature: float = option("sampling temperature, 0: greedy", default=0.0, type=real(0, 100))
    topp: float = option(
        "sample from this share of probability, 1: off, 0: greedy", default=1.0, type=real(0, 1)
    )
    seed: int = option("seed for sampling", default=_SEED, type=integer(0, (1 << 63) - 1))
    task: int | None = option(
        "task of the competition: 4 nodes, in task 1 with 2 threads and 4096 positions. Other "
        "options replace its values",
        type=int,
        choices=(1, 2, 3),
    )
    prompts: str | None = option(
        "directory with short.txt, long.txt and leaderboard.txt, for a task", metavar="DIR"
    )
    output: str | None = option(
        "parent directory of task_N (default: the current directory)",
        "-o",
        "--output",
        metavar="DIR",
    )


@dataclass(frozen=True, slots=True)
class _NodesPrompt:
    """A text to continue, and the number of prompt and output tokens."""

    text: str
    steps: int


def has_options(argv: Sequence[str]) -> bool:
    """Return whether a command line has an option of this module only.

    Options of ``tilewright run`` and ``tilewright bench`` do not count.
    """
    if "--help" in argv or "-h" in argv:
        return any(word.partition("=")[0] == "--nodes" for word in argv)
    return any(word.partition("=")[0] in _OWN_OPTIONS for word in argv)


def main(argv: list[str], prog: str = "tilewright run --nodes") -> int:
    """Run the nodes and return the exit code."""
    words = (
        "Continue a prompt on several CPU nodes, with the options and the token counts of "
        "distributed-llama. Without these options, --nodes is --tensor-parallel-size."
    )
    if "--help" in argv:  # --nodes has an optional number here
        argv = ["--help"]
    given = _parsed(argv, prog, words)
    if given.worker or given.path == _WORKER:
        from tilewright.distributed.worker import serve_worker
        from tilewright.loading.ranks import FOLLOW

        own = [] if given.config.model is None else [given.config.model]
        return serve_worker(given.host, given.port, [*FOLLOW, *own])
    if given.task is not None:
        refuse_given(given, ("prompt",), "--task; allowed: --prompts DIR")
        return _task(_settle(given))
    refuse_given(given, ("prompts", "output"), "no --task; allowed: --task 1, 2 or 3 with it")
    if given.prompt is None:
        raise ConfigError("no --prompt; allowed: --prompt TEXT, - for standard input, or --task N")
    prompt = _NodesPrompt(read_prompt(given.prompt), given.steps or _STEPS)
    source, compiled = _open(given, [prompt])
    try:
        counted = _run(
            source, compiled.executable, prompt, given, partial(print, end="", flush=True)
        )
        print("\n", *counted.lines(), sep="\n")
    finally:
        compiled.executable.close()
    return 0


def _parsed(argv: Sequence[str], prog: str, description: str) -> _NodesArgs:
    parser = Parser(prog=prog, description=description)
    add_options(parser, _NodesArgs)
    add_options(parser, EngineConfig, only=names_of(EngineConfig, MODEL))
    parsed = parser.parse_args(list(argv))
    config = EngineConfig(**{**SINGLE, **values_of(EngineConfig, parsed)})
    return _NodesArgs(config=config, **values_of(_NodesArgs, parsed))


def _settle(given: _NodesArgs) -> _NodesArgs:
    """Return the arguments with their task's defaults."""
    assert given.task is not None
    own: dict[str, Any] = {"max_seq_len": max(given.steps or max(_PROMPTS.values()), _POSITIONS)}
    own |= _TASKS[given.task]
    if given.workers:
        del own["nodes"]
    return replace(given, **{k: v for k, v in own.items() if getattr(given, k) is None})


def _task(given: _NodesArgs) -> int:
    """Run the three prompts of a task and write the required files for each."""
    if given.prompts is None:
        raise ConfigError(
            "--task without --prompts; allowed: a folder with "
            + ", ".join(f"{name}.txt" for name in _PROMPTS)
        )
    prompts = {
        name: _NodesPrompt(_read(Path(given.prompts) / f"{name}.txt"), given.steps or steps)
        for name, steps in _PROMPTS.items()
    }
    root = Path(given.output or ".") / f"task_{given.task}"
    source, compiled = _open(given, list(prompts.values()), [root / name for name in prompts])
    try:
        for name, prompt in prompts.items():
            folder, began = root / name, now()
            counted = _run(source, compiled.executable, prompt, given, lambda piece: None)
            _keep(folder, counted, _script(given, prompt), (began, now()))
            print(f"{folder}: {counted.num_predicted / max(counted.predicted_s, 1e-9):.2f} t/s")
    finally:
        compiled.executable.close()
    return 0


def _script(given: _NodesArgs, prompt: _NodesPrompt) -> str:
    """Return a shell script that repeats a prompt's run from any directory."""
    command = [*PYTHON, "-m", "tilewright.cli.main", "run"]
    model = {name: getattr(given.config, name) for name in names_of(EngineConfig, MODEL)}
    own = {each.name: getattr(given, each.name) for each in fields(given)}
    for name, value in {**model, **own}.items():
        if name in _OF_NO_PROMPT:
            continue
        if value in (None, ()):
            continue
        values = [",".join(map(str, value))] if name == "shares" else value
        values = values if isinstance(values, list | tuple) else [values]
        command += ["--" + name.replace("_", "-"), *map(str, values)]
    command += ["--steps", str(prompt.steps), "--prompt", "-"]
    enter = shlex.join(["cd", os.getcwd()])  # paths in the arguments are relative to it
    said = shlex.join(["printf", "%s", prompt.text])  # an argument may be too long for a shell
    return f"#!/bin/sh\n{enter} || exit 2\n{said} |\n{shlex.join(command)}\n"


def _keep(folder: Path, counted: NodesTiming, script: str, times: tuple[str, str]) -> None:
    text = "\n".join([counted.text, "", *counted.lines(), ""])
    write_file(folder / "output.txt", text.encode())
    write_file(folder / "run.sh", script.encode(), mode=0o755)
    write_file(folder / "timestamps.txt", "start {}\nend {}\n".format(*times).encode())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror})") from None


def _read(path: Path) -> str:
    text = read_text(path)
    if not text.strip() or "\0" in text:  # NUL has no spelling in a shell
        raise ConfigError(f"{path}: empty, or with NUL characters; allowed: some text")
    return text


def _open(
    given: _NodesArgs, prompts: Sequence[_NodesPrompt], folders: Sequence[Path] = ()
) -> tuple[ModelHandle, Compiled]:
    """Load the model on all nodes after a check of all prompt lengths, and create ``folders``."""
    from tilewright.api import compile, load

    choices = _choices(given)
    source = load(choices.path)
    max_context = min(given.max_seq_len or _POSITIONS, source.max_positions)
    for prompt in prompts:
        num_tokens = len(source.tokenizer.encode(prompt.text, add_special=True))
        limit = min(prompt.steps, max_context)
        if not 1 <= num_tokens <= limit:
            raise ConfigError(
                f"a prompt of {num_tokens} tokens ({prompt.text[:40]!r}); allowed: 1 to {limit} "
                "(--steps, --max-seq-len)"
            )
    for folder in folders:
        _make(folder)
    for note in (*source.notes, *_notes(given, prompts, max_context)):
        print(f"tilewright: {note}", file=sys.stderr)
    choices = choices.changed(max_model_len=max_context, num_threads=given.nthreads)
    compiled = compile(source, choices)
    detail = compiled.executable.device_detail
    print(f"{source.name} on {compiled.target}, {detail}", file=sys.stderr)
    return source, compiled


def _notes(given: _NodesArgs, prompts: Sequence[_NodesPrompt], max_context: int) -> list[str]:
    """Return a line for each difference from the task or the arguments."""
    notes = []
    if given.task is not None:
        own = _TASKS[given.task] | {"steps": ", ".join(map(str, _PROMPTS.values()))}
        actual = {name: getattr(given, name) for name in own} | {"nodes": _num_nodes(given)}
        actual["steps"] = actual["steps"] or own["steps"]
        others = [f"{n} {actual[n]} in place of {own[n]}" for n in own if actual[n] != own[n]]
        notes += [f"task {given.task} with {'; '.join(others)}"] if others else []
    if (given.max_seq_len or 0) > max_context:
        notes.append(f"{given.max_seq_len} positions requested; the model has {max_context}")
    for steps in sorted({each.steps for each in prompts if each.steps > max_context}):
        notes.append(f"{steps} steps end at {max_context} positions (--max-seq-len)")
    if given.buffer_float_type is not None and _num_nodes(given) == 1:
        notes.append(f"--buffer-float-type {given.buffer_float_type}: one node sends nothing")
    return notes


def _num_nodes(given: _NodesArgs) -> int:
    return len(given.workers) + 1 if given.workers else given.nodes or 1


def _choices(given: _NodesArgs) -> ResolvedConfig:
    """Return the model's resolved options with its nodes."""
    from tilewright.distributed.parallel import ParallelConfig
    from tilewright.distributed.worker import read_workers

    if given.workers and given.nodes is not None:
        raise ConfigError("--workers and --nodes; allowed: one of them")
    if given.tokenizer is not None and given.config.model is not None:
        beside = Path(given.config.model).expanduser().resolve().parent
        if Path(given.tokenizer).expanduser().resolve().parent != beside:
            raise ConfigError(f"--tokenizer {given.tokenizer}; allowed: the .t beside the model")
    choices = resolve(given.config)
    if choices.target not in ("cpu", "cpu-native"):
        raise ConfigError(f"nodes on target {choices.target}; allowed: --target cpu")
    if given.config.backend == "onnxruntime":
        raise ConfigError("nodes on backend onnxruntime; allowed: --backend native")
    wire = _wire(choices, given.buffer_float_type)
    parallel = ParallelConfig(tensor=_num_nodes(given), wire=wire, shares=given.shares or ())
    parallel.check()
    grouping = Grouping(parallel, workers=read_workers(given.workers))
    return replace(choices, target="cpu-native", is_auto=False, grouping=grouping)


def _wire(choices: ResolvedConfig, named: str | None) -> str:
    """Return the partial sum format.

    The default is fp32 for exact arithmetic. For block formats it is q80, because their matmuls
    round to it. Else it is bf16.
    """
    if named is not None:
        return _WIRES[named]
    if choices.compute == "exact":
        return "fp32"
    return "q80" if quantised_types(choices.path) else "bf16"


def _run(
    source: ModelHandle,
    executable: Executable,
    prompt: _NodesPrompt,
    given: _NodesArgs,
    say: Callable[[str], None],
) -> NodesTiming:
    """Read a prompt and continue it up to its steps or the context's end."""
    from tilewright.compiler.sampling.params import SamplingParams

    tokens = source.tokenizer.encode(prompt.text, add_special=True)
    limit = min(prompt.steps, executable.capabilities.max_context)
    sampling = SamplingParams(temperature=given.temperature, top_p=given.topp, seed=given.seed)
    stepper = Stepper(executable, sampling)
    stepper.evaluate(tokens)
    decoder, text = source.tokenizer.stream(after=tokens), ""
    for token in stepper.predict(tokens, limit):
        piece = decoder.push(token)
        text += piece
        say(piece)
    rest = decoder.flush()
    say(rest)
    return stepper.counted(prompt.text + text + rest)
