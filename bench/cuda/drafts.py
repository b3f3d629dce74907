"""``python -m bench speculative``: cost of verified drafts, and speed with an oracle, on a GPU.

The oracle drafts tokens from a plain run, and corrupts them with a set probability. Plain runs
alternate with drafted runs and must have equal tokens. These steps have no scheduler. Runs
with automatic lengths use the scheduler.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import keeper
from bench.cuda.auto_drafts import MIN_RATIO, measure_auto, show_auto
from bench.cuda.draft_costs import ACCEPTANCE, COST, PROMPT, costs_table
from tilewright.cli.arguments.bench import read_options
from tilewright.cli.terminal.console import compile_progress, err, note, out, print_table
from tilewright.errors import ConfigError
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS
from tilewright.options.arguments import integer, option, parse

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Executable
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.compiler.targets.interface.step import Slot, StateUpdate, StepOutput

_WARM_UP, _STEPS, _ROUNDS, _SPARE = 4, 24, 2, 16
_WIDTH = 160


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate <= 1:
        raise ValueError(text)
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    model: str = option("a shape with random weights", default="shape:llama-3.1-8b")
    precision: str = option("precision configuration", default="bf16")
    users: tuple[int, ...] = option(
        "concurrent requests", default=(1, 8, 32, 64), nargs="*", type=integer(1, 256)
    )
    rows: tuple[int, ...] = option(
        "verified tokens per request and step", default=(2, 4, 8), nargs="*", type=integer(2, 16)
    )
    rates: tuple[float, ...] = option(
        "probabilities for a right draft, for a single user",
        default=(0.5, 0.8),
        nargs="*",
        type=_rate,
    )
    auto_rates: tuple[float, ...] = option(
        "probabilities for a right draft, for automatic lengths",
        default=(0.0, 0.8),
        nargs="*",
        type=_rate,
    )
    auto_tokens: int = option(
        "tokens per request with automatic lengths", default=160, type=integer(8, 4096)
    )
    tokens: int = option("tokens per oracle run", default=192, type=integer(8, 4096))
    strict_rows: int = option(
        "maximum users with batch-invariant steps; 0: none",
        default=16,
        type=integer(0, 256),
    )
    results: Path | None = option("append rows, as JSON lines", metavar="FILE", type=Path)


def main(argv: Sequence[str]) -> int:
    """Run the measurements. Return 0 if all outputs with drafts equal the plain output, and if
    automatic lengths are not slower.

    Raises:
        TilewrightError: for bad arguments, or without a GPU.
    """
    words = "Measure the verification of drafts with random weights on a GPU."
    options = parse(_Options, argv, prog="python -m bench speculative", description=words)
    keep = keeper(options.results)
    compiled = _compile(options)
    executable = compiled.executable
    limits = executable.capabilities
    if limits.max_drafts < max(options.rows, default=1) - 1:
        raise ConfigError(
            f"--rows {max(options.rows)} with --strict-rows {options.strict_rows}; allowed: up to "
            f"{limits.max_drafts + 1} rows"
        )
    screen = out()
    if not screen.is_terminal:
        screen.width = max(screen.width, _WIDTH)
    note(
        screen,
        f"{options.model} {RANDOM_WEIGHTS}, {options.precision}, {executable.device_name}, "
        f"batch-invariant: {limits.invariant}, up to {limits.invariant_rows or 'any'} requests",
    )
    facts = {
        "model": options.model,
        "precision": options.precision,
        "device": executable.device_name,
        "strict_rows": options.strict_rows,
        "invariant": limits.invariant,
    }
    measured = list[Mapping[str, Any]]()

    def keep_cost(values: Mapping[str, Any]) -> None:
        measured.append({**facts, **values})
        keep(measured[-1])

    try:
        costs = _measure_costs(executable, options, keep_cost)
        print_table(screen, "cost of verification", costs_table(measured), numbers=True)
        sizes = _byte_ratios(compiled, options.rows)
        runs = _measure_oracle(
            executable, options, costs, sizes, lambda values: keep({**facts, **values})
        )
        print_table(screen, "oracle drafts, a single user", _show_runs(runs), numbers=True)
        records = measure_auto(
            executable,
            users=options.users,
            rates=options.auto_rates,
            num_drafts=min(limits.max_drafts, len(ACCEPTANCE)),
            num_tokens=options.auto_tokens,
            keep=lambda values: keep({**facts, **values}),
        )
        print_table(screen, "automatic draft lengths", show_auto(records), numbers=True)
    finally:
        executable.close()
    is_equal = all(run["differing_tokens"] == 0 for run in runs) or limits.invariant != "rows"
    return 0 if is_equal and all(each["ratio"] >= MIN_RATIO for each in records) else 1


def expected_tokens(rate: float, num_drafts: int) -> float:
    """Return the expected tokens per step for drafts that are right with probability ``rate``."""
    return sum(rate**count for count in range(num_drafts + 1))


def _compile(options: _Options) -> Compiled:
    from tilewright.api import load
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.loading.program import compile_program

    words = ["--model", options.model, "--target", "cuda", "--precision", options.precision]
    run = read_options([*words, "--no-results", "--no-cache"])
    assert run is not None
    num_drafts = max(options.rows, default=1) - 1
    steps = max((_WARM_UP + _STEPS) * (1 + num_drafts), options.auto_tokens)
    choices = CompileOptions(
        max_batch=max(1, *options.users),
        max_context=PROMPT + max(steps, options.tokens + _SPARE),
        strict_rows=options.strict_rows,
        max_drafts=num_drafts,
    )
    with compile_progress(err()) as progress:
        return compile_program(load(run.model.path), run.model, choices, progress)


def _byte_ratios(compiled: Compiled, counts: Sequence[int]) -> dict[int, float]:
    """Return the weight bytes for a step relative to a single row, by row count.

    Routing is random.
    """
    from tilewright.evaluate.measure.roofline import compiled_weight_bytes

    sizes = {count: sum(compiled_weight_bytes(compiled, count).values()) for count in (1, *counts)}
    return {count: sizes[count] / sizes[1] for count in counts}


class _Slots:
    """Open slots with random prompts. Each slot holds its first token."""

    def __init__(self, executable: Executable, count: int) -> None:
        from tilewright.compiler.sampling.params import SamplingParams
        from tilewright.compiler.targets.interface.step import (
            AssignPages,
            OpenSlot,
            PrefillChunk,
            Slot,
            Step,
        )

        self._executable, limits = executable, executable.capabilities
        executable.reset()
        self.slots = tuple(Slot(number) for number in range(count))
        size = -(-limits.max_context // (limits.page_size or limits.max_context))
        generator = random.Random(count)
        for slot in self.slots:
            pages = tuple(range(slot * size, (slot + 1) * size))
            updates: list[StateUpdate] = [OpenSlot(slot, SamplingParams())]
            updates += [AssignPages(slot, 0, pages)] if limits.page_size else []
            prompt = tuple(generator.randrange(executable.num_choosable) for _ in range(PROMPT))
            chunk = PrefillChunk(slot, 0, prompt, chooses=True)
            output = executable.step(Step(edits=tuple(updates), prompts=(chunk,)))
            _read(output)

    def launch(self, drafts: Mapping[Slot, tuple[int, ...]] | None = None) -> StepOutput:
        """Launch a decode step for all slots."""
        from tilewright.compiler.targets.interface.step import Step

        return self._executable.step(Step(decode=self.slots, drafts=drafts or {}))


def _read(output: StepOutput) -> list[int]:
    return [token for sampled in output.parts for token in sampled.read().tokens]


def _plain_run(slots: _Slots, num_steps: int) -> tuple[list[int], float]:
    """Decode without drafts, a step ahead. Return the tokens and the seconds per step."""
    tokens: list[int] = []
    times = [time.perf_counter()]
    ahead = slots.launch()
    for _ in range(num_steps):
        current, ahead = ahead, slots.launch()
        tokens += _read(current)
        times.append(time.perf_counter())
    _read(ahead)
    return tokens, statistics.median(b - a for a, b in pairwise(times))


def _measure_costs(
    executable: Executable, options: _Options, keep: Callable[[Mapping[str, Any]], None]
) -> dict[tuple[int, int], float]:
    """Return the seconds per step by users and verified rows. 1: a plain step."""
    costs: dict[tuple[int, int], float] = {}
    for users in options.users:
        slots = _Slots(executable, users)
        _plain_run(slots, _WARM_UP)
        costs[users, 1] = _plain_run(slots, _STEPS)[1]
        for rows in options.rows:
            costs[users, rows] = _verified_step(_Slots(executable, users), rows)
        for rows in (1, *options.rows):
            ms, plain_ms = 1e3 * costs[users, rows], 1e3 * costs[users, 1]
            ratio = ms / plain_ms
            keep({"figure": COST, "users": users, "rows": rows, "ms": ms, "ratio": ratio})
    return costs


def _verified_step(slots: _Slots, rows: int) -> float:
    """Return the seconds per step with random drafts. A step waits for the previous output."""
    generator, times = random.Random(rows), []
    for _ in range(_WARM_UP + _STEPS):
        drafts = {
            slot: tuple(generator.randrange(256) for _ in range(rows - 1)) for slot in slots.slots
        }
        began = time.perf_counter()
        _read(slots.launch(drafts))
        times.append(time.perf_counter() - began)
    return statistics.median(times[_WARM_UP:])


def _oracle_run(
    executable: Executable, tokens: Sequence[int], num_drafts: int, rate: float, seed: int
) -> tuple[int, int, float]:
    """Decode with drafts from ``tokens``. Return the differing tokens, steps and seconds."""
    generator, slots = random.Random(seed), _Slots(executable, 1)
    tokens_so_far: list[int] = []
    num_steps, began = 0, time.perf_counter()
    while len(tokens_so_far) < len(tokens):
        true = tokens[len(tokens_so_far) : len(tokens_so_far) + num_drafts]
        draft = tuple(token if generator.random() < rate else token ^ 1 for token in true)
        tokens_so_far += _read(slots.launch({slots.slots[0]: draft}))
        num_steps += 1
    seconds = time.perf_counter() - began
    differing = sum(a != b for a, b in zip(tokens_so_far, tokens, strict=False))
    return differing, num_steps, seconds * len(tokens) / len(tokens_so_far)


def _measure_oracle(
    executable: Executable,
    options: _Options,
    costs: Mapping[tuple[int, int], float],
    sizes: Mapping[int, float],
    keep: Callable[[Mapping[str, Any]], None],
) -> list[dict[str, Any]]:
    """Alternate plain runs and runs with drafts, for a single user.

    ``sizes``: Bytes relative to a single row, by verified rows.
    """
    num_tokens, runs = options.tokens, []
    tokens = _plain_run(_Slots(executable, 1), num_tokens)[0]
    for rate in options.rates:
        for num_drafts in (rows - 1 for rows in options.rows):
            _oracle_run(executable, tokens[:_SPARE], num_drafts, rate, 0)
            plain, drafted, steps, differing = [], [], 0, 0
            for round_number in range(_ROUNDS):
                slots = _Slots(executable, 1)
                again, seconds = _plain_run(slots, num_tokens)
                plain.append(1 / seconds)
                assert again == tokens, "two plain runs differ"
                wrong, count, seconds = _oracle_run(
                    executable, tokens, num_drafts, rate, round_number
                )
                drafted.append(num_tokens / seconds)
                steps, differing = steps + count, differing + wrong
            expected = expected_tokens(rate, num_drafts)
            ratio = costs.get((1, 1 + num_drafts), 0.0) / costs.get((1, 1), 1.0)
            run = {
                "figure": "oracle",
                "rate": rate,
                "drafts": num_drafts,
                "plain_tokens_per_s": plain,
                "tokens_per_s": drafted,
                "speedup": statistics.median(drafted) / statistics.median(plain),
                "tokens_per_step": _ROUNDS * num_tokens / steps,
                "expected_tokens_per_step": expected,
                "predicted_speedup": expected / ratio if ratio else None,
                "byte_bound": expected / sizes[1 + num_drafts],
                "differing_tokens": differing,
            }
            keep(run)
            runs.append(run)
    return runs


def _show_runs(runs: Sequence[Mapping[str, Any]]) -> Table:
    titles = ["rate", "drafts", "tokens a step (expected)", "plain (tokens/s)"]
    titles += ["with drafts (tokens/s)", "gain (x)", "predicted (x)"]
    titles += ["byte bound (x)", "differing tokens"]
    lines = []
    for run in runs:
        speeds = (f"{min(run[key]):.1f}-{max(run[key]):.1f}" for key in _SPEEDS)
        predicted = run["predicted_speedup"]
        lines.append(
            [
                f"{run['rate']:g}",
                str(run["drafts"]),
                f"{run['tokens_per_step']:.2f} ({run['expected_tokens_per_step']:.2f})",
                *speeds,
                f"{run['speedup']:.2f}",
                "-" if predicted is None else f"{predicted:.2f}",
                f"{run['byte_bound']:.2f}",
                str(run["differing_tokens"]),
            ]
        )
    return Table.of(
        titles,
        lines,
        f"{_ROUNDS} alternating rounds, greedy. Expected: (1 - r^(k+1)) / (1 - r) tokens a step.",
        "Predicted: expected tokens by the measured cost of the rows. Byte bound: by the weights.",
    )


_SPEEDS = ("plain_tokens_per_s", "tokens_per_s")
