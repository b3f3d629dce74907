"""``tilewright nodes``: a model on several CPU nodes, with distributed-llama's command line.

Its counting too: ``--steps`` counts the prompt's tokens and the generated ones, end tokens are not
ends, and only the time of steps counts.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.compiler.commands.arguments import (
    CHECKPOINT_PRECISION,
    ModelOptions,
    PathArguments,
    integer,
    option,
    parse,
    read_model_options,
    read_prompt,
    real,
)
from tilewright.compiler.commands.parallel import numbers
from tilewright.compiler.distributed.grouping import Grouping
from tilewright.compiler.environment import now
from tilewright.compiler.errors import ConfigError
from tilewright.models import quantised_types

if TYPE_CHECKING:
    from tilewright.compiler.commands.source import Source
    from tilewright.compiler.targets.base import Executable
    from tilewright.compiler.targets.compiled import Compiled

_SEED = 10_042_026
_WIRES = {"f32": "fp32", "q80": "q80", "bf16": "bf16"}
_PROMPTS = ("short", "long", "leaderboard")
_INFERENCE, _WORKER = "inference", "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments(PathArguments):
    path: str | None = option(
        "inference on rank 0 (the default), or worker on another machine",
        "path",
        nargs="?",
        choices=(_INFERENCE, _WORKER),
        metavar="MODE",
    )
    tokenizer: str | None = option("dllama's .t file: the one beside the model", metavar="FILE")
    prompt: str | None = option("what is continued; - reads standard input", metavar="TEXT")
    steps: int = option("tokens of prompt and answer", default=256, type=integer(1, 1 << 20))
    nodes: int | None = option("nodes on this machine, each a process", type=integer(1, 64))
    workers: tuple[str, ...] = option(
        "the other nodes: HOST:PORT of each worker", default=(), metavar="ADDRESS"
    )
    port: int = option("of a worker", default=9999, type=integer(1, 65535))
    host: str = option("the address that a worker listens on", default="127.0.0.1")
    nthreads: int | None = option("threads of each node", "--nthreads", type=integer(1, 1024))
    max_seq_len: int = option("positions", default=4096, type=integer(1, 1 << 24))
    buffer_float_type: str | None = option(
        "how partial sums travel between nodes (default: q80 of a model in blocks, else bf16; f32 "
        "with --compute exact)",
        choices=tuple(_WIRES),
    )
    shares: tuple[int, ...] | None = option(
        "what each node holds, in proportion, as 2,1,1", type=numbers, metavar="LIST"
    )
    temperature: float = option("0: greedy", default=0.0, type=real(0, 100))
    topp: float = option("1: off", default=1.0, type=real(0, 1, above=True))
    seed: int = option("of random choices", default=_SEED, type=integer(0, (1 << 63) - 1))
    task: int | None = option(
        "the competition's: 1 is 4 nodes of 2 threads and 4,096 positions; 2 and 3 take yours",
        type=int,
        choices=(1, 2, 3),
    )
    prompts: str | None = option(
        "of a task: a folder with short.txt, long.txt, leaderboard.txt", metavar="DIR"
    )
    output: str = option("of a task: where task_N is made", "-o", "--output", default=".")


@dataclass(frozen=True, slots=True)
class _Counted:
    """What one prompt took, as distributed-llama counts it; seconds are of steps alone."""

    num_evaluated: int
    evaluated_s: float
    num_predicted: int
    predicted_s: float
    text: str
    num_batches: int
    sent_bytes: int = 0
    exchange_s: float = 0.0

    def lines(self) -> list[str]:
        found = []
        for name, count, seconds in (
            ("Evaluation", self.num_evaluated, self.evaluated_s),
            ("Prediction", self.num_predicted, self.predicted_s),
        ):
            found.append(name)
            if name == "Evaluation":
                found.append(f"   nBatches: {self.num_batches}")
            rate = count / seconds if seconds > 0 else 0.0
            each = 1000 * seconds / count if count else 0.0
            found += [f"    nTokens: {count}", f"   tokens/s: {rate:.2f} ({each:.2f} ms/tok)"]
        if self.sent_bytes:
            each = 1000 * self.exchange_s / self.num_predicted
            kilobytes = self.sent_bytes / 1000 / self.num_predicted
            found += ["Exchange", f"       sent: {kilobytes:.1f} kB/tok"]
            found.append(f"       time: {each:.2f} ms/tok")
        return found


def main(argv: list[str]) -> int:
    """Run ``tilewright nodes`` with the arguments behind it; returns the exit code."""
    words = "Run a model over CPU nodes, as distributed-llama is run."
    given = parse(_Arguments, argv, prog="tilewright nodes", description=words)
    if given.path == _WORKER:
        from tilewright.compiler.commands.ranks import FOLLOW
        from tilewright.compiler.distributed.worker import serve_worker

        own = [] if given.model is None else [given.model]
        return serve_worker(given.host, given.port, [*FOLLOW, *own])
    if given.task is not None:
        return _task(given, argv)
    if given.prompt is None:
        raise ConfigError("no --prompt; allowed: --prompt TEXT, - for standard input, or --task N")
    prompt = read_prompt(given.prompt)
    source, compiled = _open(given, [prompt])
    try:
        _print(_run(source, compiled.executable, prompt, given, _show))
    finally:
        compiled.executable.close()
    return 0


def _task(given: _Arguments, argv: Sequence[str]) -> int:
    """Run the three prompts of a task and leave what the competition wants of each."""
    if given.prompts is None:
        raise ConfigError(
            "--task without --prompts; allowed: a folder with "
            + ", ".join(f"{name}.txt" for name in _PROMPTS)
        )
    texts = {name: _read(Path(given.prompts) / f"{name}.txt") for name in _PROMPTS}
    if given.task == 1:
        nodes = None if given.workers else 4
        given = replace(given, nodes=nodes, nthreads=2, max_seq_len=4096)
    folders = {name: Path(given.output) / f"task_{given.task}" / name for name in _PROMPTS}
    for folder in folders.values():
        _make(folder)
    source, compiled = _open(given, list(texts.values()))
    try:
        for name, text in texts.items():
            folder = folders[name]
            began = now()
            counted = _run(source, compiled.executable, text, given, lambda piece: None)
            _keep(folder, counted, argv, (began, now()))
            print(f"{folder}: {counted.num_predicted / max(counted.predicted_s, 1e-9):.2f} t/s")
    finally:
        compiled.executable.close()
    return 0


def _keep(folder: Path, counted: _Counted, argv: Sequence[str], times: tuple[str, str]) -> None:
    try:
        text = "\n".join([counted.text, "", *counted.lines(), ""])
        (folder / "output.txt").write_text(text, encoding="utf-8")
        command = shlex.join(["tilewright", "nodes", *argv])
        (folder / "run.sh").write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
        (folder / "timestamps.txt").write_text("start {}\nend {}\n".format(*times))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror})") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no text ({error})") from None


def _open(given: _Arguments, prompts: Sequence[str]) -> tuple[Source, Compiled]:
    """The model on all its nodes, once it is known that there is room for all prompts."""
    from tilewright.compiler.commands.source import compile_source, open_source
    from tilewright.compiler.targets.base import CompileOptions
    from tilewright.compiler.targets.compiled import silent

    choices = _choices(given)
    source = open_source(choices.path)
    max_context = min(given.max_seq_len, source.max_positions)
    for prompt in prompts:
        num_tokens = len(source.tokenizer.encode(prompt, add_special=True))
        limit = min(given.steps, max_context)
        if not 1 <= num_tokens <= limit:
            raise ConfigError(
                f"a prompt of {num_tokens} tokens ({prompt[:40]!r}); allowed: 1 to {limit} "
                "(--steps, --max-seq-len)"
            )
    options = CompileOptions(
        max_batch=1,
        max_context=max_context,
        compute=choices.compute,
        num_threads=given.nthreads,
    )
    compiled = compile_source(source, choices, options, silent, use_cache=True)
    detail = compiled.executable.device_detail
    print(f"{source.name} on {compiled.target}, {detail}", file=sys.stderr)
    return source, compiled


def _choices(given: _Arguments) -> ModelOptions:
    """The model's options, with the nodes that the arguments name."""
    from tilewright.compiler.distributed.parallel import Parallel
    from tilewright.compiler.distributed.worker import read_workers

    if given.workers and given.nodes is not None:
        raise ConfigError("--workers and --nodes; allowed: one of them")
    if given.tokenizer is not None and given.model is not None:
        beside = Path(given.model).expanduser().resolve().parent
        if Path(given.tokenizer).expanduser().resolve().parent != beside:
            raise ConfigError(f"--tokenizer {given.tokenizer}; allowed: the .t beside the model")
    choices = read_model_options(replace(given, path=None, shares=None), CHECKPOINT_PRECISION)
    if choices.target not in ("cpu", "cpu-native"):
        raise ConfigError(f"nodes on target {choices.target}; allowed: --target cpu")
    if given.backend == "onnxruntime":
        raise ConfigError("nodes on backend onnxruntime; allowed: --backend native")
    num_nodes = len(given.workers) + 1 if given.workers else given.nodes or 1
    wire = _wire(choices, given.buffer_float_type)
    parallel = Parallel(tensor=num_nodes, wire=wire, shares=given.shares or ())
    parallel.check()
    grouping = Grouping(parallel, workers=read_workers(given.workers))
    return replace(choices, target="cpu-native", is_auto=False, grouping=grouping)


def _wire(choices: ModelOptions, named: str | None) -> str:
    """The format of partial sums: that of the rounding which products of blocks do anyway."""
    if choices.compute == "exact":
        return "fp32"
    return _WIRES[named or ("q80" if quantised_types(choices.path) else "bf16")]


def _run(
    source: Source,
    executable: Executable,
    prompt: str,
    given: _Arguments,
    say: Callable[[str], None],
) -> _Counted:
    """Read a prompt and continue it, to ``--steps`` tokens of both or the context's end."""
    tokens = source.tokenizer.encode(prompt, add_special=True)
    limit = min(given.steps, executable.capabilities.max_context)
    stepper = _Stepper(executable, given)
    stepper.evaluate(tokens)
    decoder, text = source.tokenizer.stream(), ""
    for token in stepper.predict(tokens, limit):
        piece = decoder.push(token)
        text += piece
        say(piece)
    text += decoder.flush()
    return stepper.counted(prompt + text)


class _Stepper:
    """One sequence's steps, each timed."""

    def __init__(self, executable: Executable, given: _Arguments) -> None:
        from tilewright.compiler.targets.step import Choosing, Seat

        self._executable, self._seat = executable, Seat(0)
        choosing = {"temperature": given.temperature, "top_p": given.topp, "seed": given.seed}
        self._choosing = Choosing(**choosing)  # type: ignore[arg-type]
        self._seconds = [0.0, 0.0]
        self._counts = [0, 0]
        self._then = 0.0, 0.0

    def evaluate(self, tokens: Sequence[int]) -> None:
        """All of the prompt but its last token, which the first prediction reads."""
        from tilewright.compiler.targets.step import Chunk, Open, Step

        self._executable.reset()
        seat, read = self._seat, tuple(tokens[:-1])
        self._executable.step(Step(edits=(Open(seat, self._choosing, tuple(tokens)),)))
        if read:
            self._timed(0, len(read), Step(prompts=(Chunk(seat, 0, read),)))

    def predict(self, tokens: Sequence[int], limit: int) -> Any:
        """The generated tokens, until so many positions are filled."""
        from tilewright.compiler.targets.step import Chunk, Step

        self._then = self._exchanged()
        last = Chunk(self._seat, len(tokens) - 1, (tokens[-1],), chooses=True)
        decode = Step(decode=(self._seat,))
        for position in range(len(tokens) - 1, limit):
            step = Step(prompts=(last,)) if position == len(tokens) - 1 else decode
            yield self._timed(1, 1, step)

    def counted(self, text: str) -> _Counted:
        (bytes_now, seconds_now), (bytes_then, seconds_then) = self._exchanged(), self._then
        sent, seconds = bytes_now - bytes_then, seconds_now - seconds_then
        (evaluated, predicted), (first_s, rest_s) = self._counts, self._seconds
        return _Counted(evaluated, first_s, predicted, rest_s, text, 512, int(sent), seconds)

    def _exchanged(self) -> tuple[float, float]:
        """Bytes that this node has sent, and seconds in exchanges; of one node alone, none."""
        own = getattr(self._executable, "own", None)
        if own is None:
            return 0.0, 0.0
        found = own.exchanged()
        return float(found.num_bytes), found.nanoseconds / 1e9

    def _timed(self, phase: int, count: int, step: Any) -> int | None:
        began = time.perf_counter()
        parts = self._executable.step(step).parts
        token = parts[0].read().tokens[0] if parts else None
        self._seconds[phase] += time.perf_counter() - began
        self._counts[phase] += count
        return token


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _print(counted: _Counted) -> None:
    print("\n", *counted.lines(), sep="\n")
