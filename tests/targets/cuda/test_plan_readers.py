"""Attention and gate and up matmuls write the next matmul's input if it is their only reader.

Matmuls that add to the residual write the next input without its norm's factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.targets.cuda.recorded import FORMATS, plan_of, recorded_gpu, rows_of, steps_of
from tests.tiny import precision_of
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_block
from tilewright.compiler.targets.cuda.steps.plan_readers import norm_readers_of, readers_of
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    BufferView,
    KernelProgram,
    LinearOp,
)
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES


def program_of(kind: str, shape: str = "llama-3.1-8b", num_layers: int = 2) -> KernelProgram:
    config = {**SHAPES[shape], "num_hidden_layers": num_layers}
    precision = precision_of(kind, **FORMATS.get(kind, {"kv_cache": "bf16"}))
    return plan_of(config_of_hf(config, where=shape), precision)


def launches_of(
    kind: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, nvrtc.KernelSource, Any]]:
    """Return a decode step's C++ kernels with their sources and arguments."""
    program = program_of(kind)
    launched: list[tuple[str, nvrtc.KernelSource, Any]] = []
    with recorded_gpu(monkeypatch, (9, 0)), monkeypatch.context() as patch:
        steps = steps_of(program, max_rows=1024, max_context=1024)
        patch.setattr(
            nvrtc,
            "launch",
            lambda source, name, *, arguments, **_: launched.append((name, source, arguments)),
        )
        steps.decode(rows_of(num_rows), captured=True)
    return launched


def test_attention_and_gate_and_up_have_a_reader_in_every_layer() -> None:
    program = program_of("bfp8")
    readers = readers_of(program)
    found = [op for op in program.instructions if id(op) in readers]
    assert [type(op) for op in found] == [AttentionOp, LinearOp] * 2


def test_only_the_single_reader_of_whole_tiles_counts() -> None:
    program = program_of("bfp8")
    at = next(i for i, op in enumerate(program.instructions) if isinstance(op, AttentionOp))
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
    assert not has_reader(attention, replace(matmul, swiglu=True))
    part = replace(attention.out, width=64, stride=attention.out.width)
    assert not has_reader(attention, matmul, replace(attention, out=part), again)
    assert not has_reader(
        replace(attention, out=replace(attention.out, **narrow)),
        replace(matmul, x=replace(matmul.x, **narrow)),
    )


@pytest.mark.parametrize(
    ("kind", "num_rows", "is_arranged"),
    [
        *(("bfp8", count, True) for count in (24, 64, 256, 512)),
        ("bfp8", 513, False),
        ("q40", 64, True),
        ("bf16", 64, False),
    ],
)
def test_the_next_matmul_reads_what_attention_writes(
    kind: str, num_rows: int, is_arranged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches_of(kind, num_rows, monkeypatch)
    found = [at for at, (name, *_) in enumerate(launched) if name.startswith(("attend", "walk"))]
    assert len(found) == 2
    for at in found:
        attention, (_, source, matmul) = launched[at][2], launched[at + 1]
        assert bool(attention.num_places) == is_arranged
        if is_arranged:
            assert matmul.product.x_stride == attention.num_places
            assert matmul.product.num_tokens == num_rows
            is_coded = source is gemm_block.CODED_SOURCE
            assert bool(attention.is_coded) == is_coded == (kind == "q40")


def test_a_norm_of_the_residual_has_the_next_matmul_as_reader() -> None:
    program = program_of("bfp8")
    readers = norm_readers_of(program)
    deferred = [op for op in program.instructions if id(op) in readers]
    assert len(deferred) == 3 and all(isinstance(op, LinearOp) and op.residual for op in deferred)
    assert all(reader.norm is not None for reader in readers.values())

    def has_reader(*instructions: Any) -> bool:
        return id(instructions[0]) in norm_readers_of(replace(program, instructions=instructions))

    first: Any = deferred[0]
    reader = readers[id(first)]
    assert has_reader(first, reader)
    assert not has_reader(replace(first, residual=False), reader)
    assert not has_reader(replace(first, bias=first.weight), reader)
    assert not has_reader(replace(first, norm=reader.norm), reader)
    assert not has_reader(first, replace(reader, norm=None))
    assert not has_reader(first, replace(reader, group="shared_experts"))
    assert not has_reader(first, replace(reader, fqn="model.cross_layers.0.wq"))
    assert not has_reader(first, replace(reader, x=reader.out))
    assert not has_reader(
        replace(first, out=BufferView(0, 64)), replace(reader, x=BufferView(0, 64))
    )


@pytest.mark.parametrize(
    ("kind", "num_rows", "count"),
    [
        ("bfp8", 16, 0),
        ("bfp8", 17, 3),
        ("bfp8", 32, 3),
        ("bfp8", 33, 0),
        ("bf16", 32, 0),
        ("q40", 32, 0),
    ],
)
def test_a_decode_step_defers_norms(
    kind: str, num_rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matmul reads what the preceding matmul wrote."""
    launched = launches_of(kind, num_rows, monkeypatch)
    norms = [getattr(each, "norms", None) for *_, each in launched]
    deferred = [at for at, each in enumerate(norms) if each is not None and each.next_groups]
    assert len(deferred) == count
    for at in deferred:
        first, second = norms[at], norms[at + 1]
        assert second is not None and second.num_squares == first.next_groups == 64
        assert first.next_places == launched[at + 1][2].product.x_stride
    assert sum(each is not None and each.num_squares > 0 for each in norms) == count


def test_a_matmul_that_reads_scratch_does_not_defer_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After linear attention, wo reads the memory that deferred norms write."""
    program = program_of("bfp8", "qwen3.8-27b", 4)
    launched: list[tuple[Any, Any, bool]] = []
    real = gemm_block.linear

    def linear(
        out: Any, x: Any, packed: Any, *, arranged: Any, after: Any = None, **how: Any
    ) -> None:
        launched.append((arranged, after, how["is_there"]))
        real(out, x, packed, arranged=arranged, after=after, **how)

    with recorded_gpu(monkeypatch, (9, 0)):
        steps = steps_of(program, max_rows=128, max_context=1024)
        monkeypatch.setattr(gemm_block, "linear", linear)
        steps.decode(rows_of(32), captured=True)
    deferring = [each for each in launched if each[1] is not None]
    assert len(deferring) == 3 and len(launched) > 8
    assert all(is_there and after.x is not arranged for arranged, after, is_there in deferring)
