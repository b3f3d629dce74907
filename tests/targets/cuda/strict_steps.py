"""Run in a process of its own, for the library's workspace is withheld when a process starts: one
prompt cut in many ways, alone and beside others, has to have the same logits, bit for bit.
"""

from __future__ import annotations

import sys

import torch

from tilewright.compiler.commands.options import read_options
from tilewright.compiler.commands.source import compile_source, open_source
from tilewright.compiler.runtime.engine import Engine
from tilewright.compiler.targets.base import CompileOptions, Executable

_NUM_OTHERS, _STEPS = 15, 6


def main(shape: str, precision: str) -> int:
    asked = ["--model", f"shape:{shape}", "--target", "cuda", "--precision", precision]
    run = read_options([*asked, "--no-results", "--no-cache"])
    assert run is not None
    options = CompileOptions(max_batch=1 + _NUM_OTHERS, max_context=2048, is_strict=True)
    source = open_source(run.model.path)
    executable = compile_source(
        source, run.model, options, lambda what, done, total: None, use_cache=False
    ).executable
    print("invariant", executable.capabilities.invariant)
    if executable.capabilities.invariant != "rows":
        return 1
    torch.manual_seed(0)
    worst = 0
    for length in (1, 5, 64, 65, 200, 513, 777, 1300):
        prompt = torch.randint(0, 1000, (length,))
        alone = answers(executable, prompt, step_tokens=None, others=0)
        for step_tokens, others in ((64, 0), (128, 0), (192, 3), (512, 0), (None, _NUM_OTHERS)):
            found = answers(executable, prompt, step_tokens=step_tokens, others=others)
            differing = sum(not torch.equal(a, b) for a, b in zip(alone, found, strict=True))
            worst = max(worst, differing)
            if differing:
                print(f"{length} tokens, {step_tokens} a step, {others} others: {differing} differ")
    executable.close()
    return 1 if worst else 0


def answers(
    executable: Executable, prompt: torch.Tensor, *, step_tokens: int | None, others: int
) -> list[torch.Tensor]:
    """The logits of a prompt's end and of some greedy steps behind it, beside other sequences."""
    executable.reset()
    engine = Engine(executable, step_tokens=step_tokens)
    ids = list(range(1 + others))
    crowd = [torch.randint(0, 1000, (17 + 40 * each,)) for each in range(others)]
    logits = engine.prefill(ids, [prompt, *crowd])
    found = [logits[0].clone()]
    for _ in range(_STEPS):
        logits = engine.decode(ids, logits.argmax(-1))
        found.append(logits[0].clone())
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
