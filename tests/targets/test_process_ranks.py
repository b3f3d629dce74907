"""Ranks in processes of their own give the bits of ranks that are advanced in one process."""

from __future__ import annotations

import torch

from tilewright.api import load
from tilewright.cli.arguments.bench import read_options
from tilewright.compiler.driver import compile_virtual
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.ranks.sharded import ShardedExecutable
from tilewright.loading.program import compile_program
from tilewright.runtime.engine import Engine

PROMPTS = [torch.tensor([5, 300, 17]), torch.tensor([9])]


def logits_of(executable: Executable) -> torch.Tensor:
    """Of prompts and of tokens behind them that do not depend on the logits; bfloat16 is sent."""
    engine = Engine(executable)
    found = [engine.prefill([0, 1], PROMPTS)]
    found += [engine.decode([0, 1], torch.tensor([7 * step, 11])) for step in range(3)]
    return torch.stack(found)


def test_processes_give_the_bits_of_ranks_in_one_process() -> None:
    argv = ["--model", "shape:tiny", "--target", "reference", "--no-results", "--no-cache"]
    options = read_options([*argv, "--tensor-parallel", "2", "--wire", "bf16"])
    assert options is not None
    limits = CompileOptions(max_batch=2, max_context=32)
    source = load(options.model.path)
    compiled = compile_program(source, options.model, limits, silent)
    try:
        assert isinstance(compiled.executable, ShardedExecutable)
        found = logits_of(compiled.executable)
    finally:
        compiled.executable.close()
    limits = CompileOptions(max_batch=2, max_context=32, parallel=options.model.grouping.parallel)
    model = source.checkpoint_model()
    precision = options.model.precision
    assert precision is not None
    virtual = compile_virtual(model, precision, options=limits)
    assert torch.equal(found, logits_of(virtual.executable))
