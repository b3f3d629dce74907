"""Attention and gate and up matmuls write the next matmul's input if it is their only reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.targets.cuda.recorded import FORMATS, plan_of, recorded_gpu, rows_of, steps_of
from tests.tiny import precision_of
from tilewright.compiler.targets.cuda.steps.plan_readers import readers_of
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    BufferView,
    KernelProgram,
    LinearOp,
)
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES


def program_of(kind: str) -> KernelProgram:
    config = {**SHAPES["llama-3.1-8b"], "num_hidden_layers": 2}
    precision = precision_of(kind, **FORMATS[kind])
    return plan_of(config_of_hf(config, where="llama-3.1-8b"), precision)


def test_attention_and_gate_and_up_have_a_reader_in_every_layer() -> None:
    program = program_of("bfp8")
    found = [each for each in program.instructions if id(each) in readers_of(program)]
    assert [type(each) for each in found] == [AttentionOp, LinearOp] * 2


def test_only_the_single_reader_of_whole_tiles_counts() -> None:
    program = program_of("bfp8")
    at = next(i for i, each in enumerate(program.instructions) if isinstance(each, AttentionOp))
    attention, matmul, other = program.instructions[at : at + 3]
    assert isinstance(attention, AttentionOp) and isinstance(matmul, LinearOp)

    def has_reader(*instructions: Any) -> bool:
        return id(instructions[0]) in readers_of(replace(program, instructions=instructions))

    again = replace(matmul, out=BufferView(9, 64))
    narrow: Any = {"width": 64}
    assert has_reader(attention, matmul)
    assert has_reader(attention, matmul, attention, again)
    assert not has_reader(attention, matmul, again)
    assert not has_reader(attention, other, matmul)
    assert not has_reader(attention, replace(matmul, norm=attention.inv_freq))
    assert not has_reader(attention, replace(matmul, x=matmul.out))
    assert not has_reader(
        replace(attention, out=replace(attention.out, **narrow)),
        replace(matmul, x=replace(matmul.x, **narrow)),
    )


@pytest.mark.parametrize("num_rows", [33, 64, 256])
def test_no_kernel_arranges_the_output_of_attention(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {kind: program_of(kind) for kind in ("bfp8", "bf16")}
    with recorded_gpu(monkeypatch, (9, 0)) as launches:
        for kind, program in programs.items():
            steps = steps_of(program, max_rows=256, max_context=1024)
            launches.clear()
            steps.decode(rows_of(num_rows), captured=True)
            assert "gemm_block:arrange" not in launches.kernels
            assert not steps._kernels(is_strict=False).products._is_fed
            is_block = any(name.startswith("gemm_block") for name in launches.kernels)
            assert is_block == (kind == "bfp8")
