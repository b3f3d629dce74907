"""Runs with drafts and without. As a process: compare their tokens and log probabilities bit for
bit. A process withholds the library's workspace at its start.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.tiny import leave_slot, random_tokens, take_slot
from tilewright.api import load
from tilewright.cli.arguments.bench import read_options
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.step import (
    PrefillChunk,
    SampledTokens,
    Slot,
    Step,
    SwapHandle,
    SwapIn,
    SwapOut,
)
from tilewright.loading.program import compile_program

Line = list[tuple[int, float]]
"""Tokens with log probabilities, or with 0.0."""
Drafter = Callable[[int, int], tuple[int, ...]]
"""Returns the drafts of a request after its first tokens, by request and number of tokens."""
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.3, seed=8, top_k=20, top_p=0.8),
    SamplingParams(temperature=0.9, seed=3, logit_bias=((5, 1.5),), frequency_penalty=0.4),
)
_NUM_TOKENS, _SPARE = 40, 16


def no_drafts(request: int, done: int) -> tuple[int, ...]:
    """Draft nothing."""
    return ()


def oracle(lines: Sequence[Line], counts: Sequence[int], rate: float) -> Drafter:
    """Draft tokens from a plain run. A token is wrong with probability 1 - ``rate``."""
    generator = random.Random(0)

    def draft(request: int, done: int) -> tuple[int, ...]:
        true = [token for token, _ in lines[request][done : done + counts[request]]]
        return tuple(token if generator.random() < rate else token ^ 1 for token in true)

    return draft


class Requests:
    """Requests on an executable. Each slot holds its first token after the prompt."""

    def __init__(
        self,
        executable: Executable,
        lengths: Sequence[int],
        params: SamplingParams,
        logprobs: int | None,
    ) -> None:
        self.executable, self.logprobs = executable, logprobs
        self.lines: list[Line] = [[] for _ in lengths]
        self.slots: list[Slot] = []
        self.samplings = [replace(params, seed=params.seed + n) for n in range(len(lengths))]
        for number, length in enumerate(lengths):
            slot = take_slot(executable, 0, self.samplings[number])
            chunk = PrefillChunk(slot, 0, tuple(random_tokens(length, seed=number)), chooses=True)
            executable.step(Step(prompts=(chunk,))).parts[0].read()
            self.slots.append(slot)

    def step(
        self, requests: Sequence[int], drafts: dict[int, tuple[int, ...]]
    ) -> Callable[[], None]:
        """Launch a step. Return the function that reads its tokens."""
        slots = tuple(self.slots[request] for request in requests)
        given = {self.slots[request]: draft for request, draft in drafts.items() if draft}
        step = Step(decode=slots, drafts=given, logprobs=self.logprobs)
        parts = self.executable.step(step).parts
        by_slot = dict(zip(slots, requests, strict=True))

        def read() -> None:
            for part in parts:
                self._take([by_slot[slot] for slot in part.slots], part.read())

        return read

    def _take(self, requests: Sequence[int], chosen: SampledTokens) -> None:
        counts = chosen.counts or [1] * len(requests)
        assert len(counts) == len(requests)
        assert sum(counts) == len(chosen.tokens) == len(chosen.why)
        scores = [0.0] * len(chosen.tokens)
        if chosen.logprobs is not None:
            scores = [each.chosen for each in chosen.logprobs]
        rows = iter(zip(chosen.tokens, scores, strict=True))
        for request, count in zip(requests, counts, strict=True):
            self.lines[request] += itertools.islice(rows, count)

    def swap(self, request: int) -> None:
        """Move the state of a request to the host and back, into another slot."""
        slot, place = self.slots[request], SwapHandle(0)
        self.executable.step(Step(edits=(SwapOut(slot, place),)))
        other = take_slot(self.executable, 0, self.samplings[request])
        leave_slot(self.executable, slot)
        self.executable.step(Step(edits=(SwapIn(other, place),)))
        self.slots[request] = other

    def close(self) -> None:
        """Close all slots."""
        for slot in self.slots:
            leave_slot(self.executable, slot)


def run(
    executable: Executable,
    lengths: Sequence[int],
    params: SamplingParams,
    drafter: Drafter,
    *,
    num_tokens: int = _NUM_TOKENS,
    logprobs: int | None = None,
    is_ahead: bool = False,
    swaps: int | None = None,
) -> tuple[list[Line], int]:
    """Return the tokens after the first token by request, and the number of steps.

    ``is_ahead``: Requests without drafts run a second step before the first output is read.
    ``swaps``: Request to swap out and in after every second step.
    """
    requests = Requests(executable, lengths, params, logprobs)
    lines, num_steps = requests.lines, 0
    while running := [n for n, line in enumerate(lines) if len(line) < num_tokens]:
        drafts = {n: drafter(n, len(lines[n])) for n in running}
        reads = [requests.step(running, drafts)]
        plain = [n for n in running if not drafts[n]]
        if is_ahead and plain:
            reads.append(requests.step(plain, {}))
        if swaps is not None and num_steps % 2:
            requests.swap(swaps)
        for read in reads:
            read()
        num_steps += 1
    requests.close()
    return [line[:num_tokens] for line in lines], num_steps


def main(shape: str, precision: str, slots: str) -> int:
    asked = ["--model", f"shape:{shape}", "--target", "cuda", "--precision", precision]
    given = read_options([*asked, "--no-results", "--no-cache"])
    assert given is not None
    count, _, small = slots.partition("/")  # "256/16": strict while at most 16 slots are open
    options = CompileOptions(
        max_batch=int(count),
        max_context=1024,
        is_strict=not small,
        strict_rows=int(small or 0),
        max_drafts=7,
    )
    source = load(given.model.path)
    compiled = compile_program(source, given.model, options, lambda what, done, total: None)
    executable = compiled.executable
    print("invariant", executable.capabilities.invariant, executable.capabilities.max_drafts)
    if executable.capabilities.invariant != "rows":
        return 1
    if options.max_batch == 2:
        executable.prepare()
    worst = compare(executable)
    executable.close()
    return 1 if worst else 0


def compare(executable: Executable) -> int:
    """Return how many runs with drafts differ from their plain run. Print them."""
    cases: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((60,), (7,), {}),
        ((50, 3), (3, 0), {"is_ahead": True}),
        ((61, 10, 500, 125), (1, 2, 3, 7), {"swaps": 2}),
        (tuple(range(3, 16)), (3, 0, 1) * 5, {}),
    ]
    num_wrong = 0
    for params, logprobs, (lengths, counts, how) in itertools.product(SAMPLINGS, (None, 0), cases):
        if len(lengths) > executable.capabilities.max_num_seqs:
            continue
        plain, _ = run(executable, lengths, params, no_drafts, logprobs=logprobs)
        spare = [[*line, *line[:_SPARE]] for line in plain]
        for rate in (0.0, 0.5, 1.0):
            drafter = oracle(spare, counts, rate)
            found, num_steps = run(executable, lengths, params, drafter, logprobs=logprobs, **how)
            if found != plain:
                num_wrong += 1
                print(f"{params}, {logprobs=}, {lengths}, {counts}, {how}, {rate=}: differs")
            elif rate == 1.0 and 0 not in counts:
                assert num_steps <= -(-_NUM_TOKENS // (1 + min(counts))), num_steps
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
