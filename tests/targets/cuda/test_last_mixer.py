"""Prefill selects the rows with logits after the last mixer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5_moe import ON_CUDA
from tests.targets.cuda.recorded import LAYERS, plan_of, recorded_gpu, rows_of, steps_of
from tests.tiny import (
    compiled,
    leave_slot,
    precision_of,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.steps.last_mixer import last_mixer_of
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot, Step
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    BufferView,
    Convolve,
    DeltaRuleOp,
    GatherOp,
    KernelProgram,
)
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES

BF16 = precision_of("bf16")
MODELS: dict[str, Any] = {
    "dense": {"num_layers": 2},
    "hybrid": {**ON_CUDA, "model_type": "qwen3_5_moe", "hidden_size": 16, "num_layers": 2},
}


def program_of(model: str) -> KernelProgram:
    return plan_of(config_of_hf({**SHAPES[model], **LAYERS[model]}, where=model), BF16)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_later_instructions_read_the_selected_values(model: str) -> None:
    program = program_of(model)
    last = last_mixer_of(program)
    assert last is not None and isinstance(last.instruction, AttentionOp)
    stream = next(op.x for op in program.instructions if isinstance(op, GatherOp))
    gate = {BufferView(1, 4096, 5120, 9216)} if model == "qwen3.5-35b-a3b" else set()
    assert set(last.views) == {last.instruction.out, stream} | gate


def test_programs_without_a_gather_or_a_mixer_select_nothing() -> None:
    """Two layouts of a buffer cannot be selected at once."""
    program = program_of("llama-3.1-8b")
    for kinds in (GatherOp, AttentionOp | Convolve | DeltaRuleOp):
        rest = [op for op in program.instructions if not isinstance(op, kinds)]
        assert last_mixer_of(replace(program, instructions=tuple(rest))) is None
    mixer = last_mixer_of(program)
    assert mixer is not None and isinstance(mixer.instruction, AttentionOp)
    at = program.instructions.index(mixer.instruction) + 1
    reader: Any = program.instructions[at]
    narrow = replace(reader, x=replace(reader.x, width=reader.x.width // 2))
    both = (*program.instructions[:at], narrow, *program.instructions[at:])
    assert last_mixer_of(replace(program, instructions=both)) is None


def test_prefill_ends_with_matmuls_for_a_single_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk without logits ends with its keys and values."""
    program = program_of("llama-3.1-8b")
    with recorded_gpu(monkeypatch, (9, 0)) as launches:
        steps = steps_of(program, max_rows=16, max_context=4096)
        steps._last_mixer = last_mixer_of(program)
        last = torch.zeros(1, dtype=torch.int64, device=steps.device)
        kernels = []
        for selection in (None, last):
            launches.clear()
            steps.prefill(rows_of(1024), logit_rows=selection)
            kernels.append(list(launches.kernels))
    without, whole = kernels
    assert "rotate" in without[-1] and whole[: len(without)] == without
    attention, *later = whole[len(without) :]
    assert "attend" in attention
    assert len(later) >= 4 and all("gemv" in name for name in later), later


@pytest.mark.parametrize("model", MODELS)
def test_selection_keeps_the_logits(model: str) -> None:
    """Single prompts, chunks and steps after them."""
    executable = compiled(
        tiny_model(std=0.2, **MODELS[model]), "cuda", precision=BF16, compute="fast"
    )
    assert isinstance(executable, CudaExecutable)
    steps, tokens = executable._steps, random_tokens(21)
    assert steps._last_mixer is not None
    logits = []
    for last in (steps._last_mixer, None):
        steps._last_mixer = last
        slot = take_slot(executable, 32)
        parts = [step(executable, [(slot, tokens[:9], 0)]), _chunk(executable, slot, tokens)]
        parts.append(step(executable, [(slot, [7], 21)]))
        leave_slot(executable, slot)
        logits.append(torch.cat(parts))
    torch.testing.assert_close(*logits, atol=0.02, rtol=0.02)


def _chunk(executable: CudaExecutable, slot: Slot, tokens: list[int]) -> torch.Tensor:
    """Run a chunk without logits, then the rest of a prompt."""
    chunk = PrefillChunk(slot, 9, tuple(tokens[9:15]), chooses=False)
    assert not executable.step(Step(prompts=(chunk,))).parts
    return step(executable, [(slot, tokens[15:], 15)])
