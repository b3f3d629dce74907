"""Check that a prompt has equal logits for any chunks and with other sequences, bit for bit.

Runs in a separate process, because the cuBLAS workspace is disabled at process start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.api import load
from tilewright.cli.arguments.bench import read_options
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.step import PrefillChunk, Step
from tilewright.loading.program import compile_program
from tilewright.runtime.engine import Engine, _Sequence

_STEPS, _PIECE = 6, 150
_LENGTHS = (1, 5, 64, 65, 200, 513, 777, 1300, 2300)
_CUTS = (64, 128, 192, 512)
_COMPANIES = (1, 7, 15, 16, 63, 199)
"""How many others decode beside a row: steps of 2, 8, 16, 17, 64 and 200 rows."""


class Busy(Engine):
    """An engine with a chunk of a guest's prompt in each decode step."""

    guest: _Sequence | None = None
    num_computed = 0

    def _feed(self, live: Sequence[_Sequence], tokens: Sequence[int]) -> torch.Tensor:
        if self.guest is None:
            self.guest = self._fill_slots([1 + n % 900 for n in range(_STEPS * _PIECE)])
        for sequence in live:
            self._grow(sequence, sequence.length + 1)
        forced = {each.slot: token for each, token in zip(live, tokens, strict=True)}
        start, self.num_computed = self.num_computed, self.num_computed + _PIECE
        piece = PrefillChunk(
            self.guest.slot, start, tuple(self.guest.prompt[start : start + _PIECE])
        )
        return self._run(Step(decode=tuple(forced), prompts=(piece,), forced=forced))


def main(shape: str, precision: str, slots: str, *more: str) -> int:
    asked = ["--model", f"shape:{shape}", "--target", "cuda", "--precision", precision]
    run = read_options([*asked, "--no-results", "--no-cache", *more])
    assert run is not None
    count, _, small = slots.partition("/")  # "256/16": strict while at most 16 sequences are open
    options = CompileOptions(
        max_batch=int(count), max_context=4096, is_strict=not small, strict_rows=int(small or 0)
    )
    source = load(run.model.path)
    compiled = compile_program(source, run.model, options, lambda what, done, total: None)
    executable = compiled.executable
    print("invariant", executable.capabilities.invariant)
    if executable.capabilities.invariant != "rows":
        return 1
    worst = compare(executable)
    executable.close()
    return 1 if worst else 0


def compare(executable: Executable, lengths: Sequence[int] = _LENGTHS) -> int:
    """Return the maximum number of prompt steps with different logits, and print their places."""
    torch.manual_seed(0)
    limits = executable.capabilities
    worst, room = 0, (limits.invariant_rows or limits.max_num_seqs) - 1
    companies = [each for each in _COMPANIES if each <= room]
    with_guest = [0, *(each for each in _COMPANIES if each < room)][-3:]
    for length in lengths:
        prompt = torch.randint(0, 1000, (length,))
        alone = answers(executable, prompt)
        cases: list[dict[str, Any]] = [{"step_tokens": each} for each in _CUTS]
        cases += [{"others": each, "step_tokens": 192 if each == 7 else None} for each in companies]
        cases += [{"others": each, "kind": Busy} for each in with_guest]
        for case in cases:
            found = answers(executable, prompt, **case)
            differing = sum(not torch.equal(a, b) for a, b in zip(alone, found, strict=True))
            worst = max(worst, differing)
            if differing:
                print(f"{length} tokens, {case}: {differing} of {len(alone)} differ")
    return worst


def answers(
    executable: Executable,
    prompt: torch.Tensor,
    *,
    step_tokens: int | None = None,
    others: int = 0,
    kind: type[Engine] = Engine,
) -> list[torch.Tensor]:
    """Return the logits of a prompt's end and of some greedy steps, with other sequences."""
    engine = kind(executable, step_tokens=step_tokens)
    row = others // 2
    prompts = [torch.randint(0, 1000, (17 + 40 * (each % 16),)) for each in range(others)]
    prompts.insert(row, prompt)
    ids = list(range(1 + others))
    logits = engine.prefill(ids, prompts)
    found = [logits[row].clone()]
    for _ in range(_STEPS):
        logits = engine.decode(ids, logits.argmax(-1))
        found.append(logits[row].clone())
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
