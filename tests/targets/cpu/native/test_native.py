"""The native cpu backend: exact values, batch-invariant rows, and errors."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import grid
from tests.targets.cpu.native.native_checks import (
    HELD,
    WIDER,
    check_exact,
    check_instruction_sets,
    check_rows_alone,
    mapped_of,
    native,
    written,
)
from tests.targets.test_conformance import SHAPES, assert_near, shaped, tokens_of
from tests.tiny import (
    compiled,
    leave_slot,
    lowered,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.driver import weight_source
from tilewright.compiler.targets.cpu.native import memory as room
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.cpu.native.memory import check_room, kept_bytes, position_bytes
from tilewright.compiler.targets.cpu.native.program.assemble import assemble
from tilewright.compiler.targets.cpu.native.program.bundle import program_of
from tilewright.compiler.targets.cpu.native.program.mapping import WEIGHTS
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.step import Slot
from tilewright.compiler.targets.program.instructions import KernelProgram, Needs
from tilewright.compiler.targets.program.lowering import lower_to_program
from tilewright.errors import CheckpointError, CompileError

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

DENSE = ("gemma3_text", "mistral", "phi3", "qwen3")
FAST = [
    *(
        (name, fidelity)
        for name in ("bfp8", "bfp4", "q80", "q40")
        for fidelity in ("lofi", "hifi4")
    ),
    ("bf16", "hifi4"),
    ("fp16", "hifi4"),
    ("q41", "lofi"),
]


@pytest.mark.parametrize(("shape", "held"), grid([(each,) for each in SHAPES], HELD))
def test_exact_is_the_reference(shape: str, held: tuple[str, str, dict[str, str]]) -> None:
    """For all formats."""
    name, axis, others = held
    model = shaped(shape)
    tokens = tokens_of(model, 19)
    precision = precision_of(name, block_axis=axis, **others)
    check_exact(model, tokens, precision, [17, 1])


@pytest.mark.parametrize("model_type", DENSE)
def test_dense_architectures_are_the_reference(model_type: str) -> None:
    """Windows, head norms, norms after mixers, caps, and partial rotation with a factor."""
    changes = importlib.import_module(f"tests.models.test_{model_type}").ON_CUDA
    small = {"num_layers": 1, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}
    model = tiny_model(std=0.2, model_type=model_type, **{"hidden_size": 16, **small, **changes})
    tokens, precision = random_tokens(40), precision_of("bf16")
    check_exact(model, tokens, precision, [6, 1, 20])


@pytest.mark.parametrize(("name", "fidelity"), FAST)
def test_every_instruction_set_has_the_same_bits(name: str, fidelity: str, tmp_path: Path) -> None:
    """Also for several threads and any chunks."""
    model, tokens = tiny_model(std=0.2, hidden_size=48, head_dim=24), random_tokens(21)
    cache = "bfp8" if fidelity == "lofi" else "bf16"
    precision = precision_of(name, fidelity, **WIDER | {"kv_cache": cache})
    check_instruction_sets(model, tokens, precision, tmp_path)


def test_many_rows_in_bfp8_have_the_bits_of_some_rows(tmp_path: Path) -> None:
    """AVX2 has another kernel from 24 rows on. bfp8 has two scales per block of columns."""
    model, tokens = tiny_model(std=0.2, hidden_size=48, head_dim=24), random_tokens(140)
    precision, first = precision_of("bfp8", "lofi"), None
    for isa in range(library.library().tw_best_isa() + 1):
        executable = native(model, precision, tmp_path, isa=isa, context=144)
        for cuts in ([], [23, 24, 80]):
            whole = prefill(executable, tokens, cuts)
            first = whole if first is None else first
            assert torch.equal(whole, first)
        executable.close()


@pytest.fixture(scope="module", params=[("bfp4", "lofi"), ("q80", "hifi4")], ids=str)
def many(request: pytest.FixtureRequest) -> Executable:
    name, fidelity = request.param
    model = tiny_model(std=0.2, num_layers=1)
    cache = "bfp8" if fidelity == "lofi" else "bf16"
    precision = precision_of(name, fidelity, **WIDER | {"kv_cache": cache})
    return compiled(model, "cpu-native", precision=precision, compute="fast", max_batch=40)


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_rows_beside_it(
    many: Executable, count: int, seed: int
) -> None:
    """Bits are equal with and without other rows, at any position."""
    check_rows_alone(many, count, seed)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe"])
def test_selected_rows_have_the_bits_of_all_rows(model_type: str, tmp_path: Path) -> None:
    """The last layer computes only the rows for logits, of one sequence or several."""
    model, tokens = tiny_model(std=0.2, model_type=model_type), random_tokens(48)
    precision = precision_of("q80", "lofi", **WIDER)
    executable = native(model, precision, tmp_path, batch=2, num_threads=3)
    bounds, positions = np.array([0, 30, 48]), np.array([*range(30), *range(18)])
    every = Batch(np.array(tokens), positions, bounds, np.arange(48), (Slot(0), Slot(1)), False)
    whole = executable.forward(every).copy()
    for rows in ([47], [29, 47], [], [0, 1, 2, 30], list(range(1, 48))):
        chosen = executable.forward(replace(every, logit_rows=np.array(rows, dtype=np.int64)))
        assert np.array_equal(chosen, whole[rows]), rows
    executable.keeps_hidden = True
    assert np.array_equal(executable.forward(replace(every, logit_rows=np.array([47]))), whole[47:])
    assert len(executable.last_hidden) == 48
    executable.close()


def test_what_a_slot_held_before_weighs_nothing() -> None:
    """Old NaN values have no effect. Here a single token overflows."""
    model = tiny_model(std=0.2, num_layers=1)
    tensors = model.checkpoint.tensors
    tensors["model.embed_tokens.weight"][:, 0] = 0.0
    tensors["model.embed_tokens.weight"][60, 0] = 100.0
    tensors["model.layers.0.self_attn.v_proj.weight"][:, 0] = 1e38
    executable = compiled(model, "cpu-native", precision=precision_of("bf16"), compute="fast")
    for tail in ([9, 10], [9, 10, 11]):
        expected = prefill(executable, [5, 6, 7, *tail])[-1]
        slot = take_slot(executable, 20)
        assert not step(executable, [(slot, [5, 6, 7, 60, 60, 60, 8], 0)]).isfinite().all()
        assert torch.equal(step(executable, [(slot, tail, 3)])[-1], expected)
        leave_slot(executable, slot)
    executable.close()


def test_a_closed_program_is_not_handed_to_the_library() -> None:
    """The library would read address 0 and crash the process."""
    executable = compiled(tiny_model(num_layers=1), "cpu-native", precision=precision_of("bf16"))
    executable.close()
    for asked in (executable.memory, lambda: executable.state_bytes(8)):
        with pytest.raises(AssertionError, match="the executable is closed"):
            asked()


def _cut_short(data: bytes) -> bytes:
    return data[:-64]


def _of_another_version(data: bytes) -> bytes:
    return data[:8] + (7).to_bytes(4, "little") + data[12:]


def _of_another_program(data: bytes) -> bytes:
    return data[:40] + bytes(8) + data[48:]


def _nothing(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut_short, "bytes; allowed"),
        (_of_another_version, "version 7; allowed: 2"),
        (_of_another_program, "another program"),
        (_nothing, "not the weights"),
    ],
)
def test_a_damaged_program_is_refused(
    damage: Callable[[bytes], bytes], said: str, tmp_path: Path
) -> None:
    plan = lower_to_program(
        lowered(tiny_model(), target="cpu-native")[0], Needs(target="cpu", others="reference")
    )
    packed = written(plan, weight_source(tiny_model()), tmp_path)
    path = tmp_path / WEIGHTS
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        mapped_of(packed, tmp_path)


@settings(max_examples=60)
@given(st.data())
def test_a_program_of_other_numbers_is_refused_or_runs(data: st.DataObject) -> None:
    """Changed integers in any structure are refused, or the program stays within its memory."""
    program = _tiny_program()
    structure = data.draw(st.sampled_from(["program", "instruction", "tensor", "state", "width"]))
    value = data.draw(st.sampled_from([-1, 0, 1, 3, 16, 31, 1 << 20, (1 << 31) - 1]))
    if structure == "program":
        _set_number(program, data.draw(st.integers(0, 12)), value)
    elif structure == "instruction":
        at = data.draw(st.integers(0, program.num_instructions - 1))
        _set_number(program.instructions[at], data.draw(st.integers(0, 20)), value)
    elif structure == "tensor":
        _set_number(program.tensors[data.draw(st.integers(0, program.num_tensors - 1))], 0, value)
    elif structure == "state":
        _set_number(program.states[0], data.draw(st.integers(0, 3)), value)
    else:
        program.widths[data.draw(st.integers(0, program.num_buffers - 1))] = value
    with contextlib.suppress(CompileError):
        library.library().tw_close(library.open_engine(program))


def _set_number(structure: ctypes.Structure, index: int, value: int) -> None:
    """Set an integer field of a structure by index."""
    integers = ctypes.c_int32, ctypes.c_uint32
    fields = [field[0] for field in structure._fields_ if field[1] in integers]
    name = fields[index % len(fields)]
    if name in ("num_instructions", "num_tensors", "num_buffers", "num_states"):
        value = min(value, getattr(structure, name))  # arrays have their original length
    if name != "num_threads" or value < 4096:
        setattr(structure, name, value)


_KEPT: list[object] = []


def _plan() -> KernelProgram:
    model = tiny_model(num_layers=1)
    return lower_to_program(
        lowered(model, target="cpu-native")[0], Needs(target="cpu", others="reference")
    )


def _tiny_program() -> library.TwProgram:
    with tempfile.TemporaryDirectory() as folder:
        packed = written(_plan(), weight_source(tiny_model(num_layers=1)), Path(folder))
        mapped = mapped_of(packed, Path(folder))
    _KEPT.append(mapped)
    return program_of(packed, mapped, CompileOptions(2, 64))


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    program = _tiny_program()
    program.isa = library.library().tw_best_isa() + 1
    with pytest.raises(CompileError, match="is not on this machine; allowed: "):
        library.open_engine(program)


def test_a_cache_larger_than_memory_is_refused_with_what_fits() -> None:
    """The error allows fewer sequences or fewer positions."""
    states = assemble(_plan(), exact=False).states
    slot = kept_bytes(states) + 64 * position_bytes(states)
    with pytest.raises(CompileError, match=r"up to 5 sequences .* or up to 64 positions") as said:
        check_room(states, 8, 100, 11 * slot)
    assert "\n" not in str(said.value) and "8 sequences of 100 positions keep" in str(said.value)
    check_room(states, 5, 100, 11 * slot)
    check_room(states, 8, 64, 11 * slot)
    with pytest.raises(CompileError, match="allowed: a machine with more memory"):
        check_room(states, 1, 64, slot - 1)
    windowed = [64] * len(states)  # 1,088 positions are stored for any context
    check_room(states, 1, 100_000, kept_bytes(states) + 1088 * position_bytes(states), windowed)


@pytest.mark.parametrize("name", ["q40", "q80", "bfp4"])
def test_a_tied_embedding_in_the_format_of_the_head_is_stored_once(
    name: str, tmp_path: Path
) -> None:
    """Embedding rows are read from the head's codes."""
    model, sizes = shaped("grouped"), []
    tokens = tokens_of(model, 19)
    for embedding in (name, "bf16"):
        precision = precision_of(name, **WIDER | {"embedding": embedding})
        executable = native(model, precision, tmp_path, compute="exact")
        expected = prefill(compiled(model, precision=precision), tokens)
        assert_near(prefill(executable, tokens), expected)
        sizes.append(executable.memory().weights)
        executable.close()
    config = model.config
    padded_rows = -(-config.vocab_size // 32) * 32
    assert sizes[1] - sizes[0] == padded_rows * config.hidden_size * 2


@pytest.mark.parametrize("precision", ["bfp4", "bf16"])
def test_weights_on_large_pages_are_the_same(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the embedding stays in the mapped file, which may be unlinked. bf16 values are packed in
    12 bits with exceptions, for all row counts.
    """
    model, tokens = tiny_model(std=0.2, num_layers=1), random_tokens(50)
    cuts = [1, 2, 9]
    executable = native(model, precision_of(precision), tmp_path, num_threads=3)
    expected = prefill(executable, tokens)
    executable.close()
    monkeypatch.setattr(room, "_WORTH_COPYING", 0)
    monkeypatch.setattr(room, "_SPARE", 0)
    monkeypatch.setenv("TILEWRIGHT_LARGE_PAGES", "0")
    assert not room.are_large_pages_worth(1)
    monkeypatch.delenv("TILEWRIGHT_LARGE_PAGES")
    assert not room.are_large_pages_worth(room.memory_bytes())
    if not room.are_large_pages_worth(1):
        pytest.skip("the system gives no large pages")
    executable = native(model, precision_of(precision), tmp_path, num_threads=3)
    (tmp_path / WEIGHTS).unlink()
    assert torch.equal(prefill(executable, tokens), expected)
    assert torch.equal(prefill(executable, tokens, cuts), expected)
    executable.close()


def test_times_of_a_step_are_told_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWRIGHT_NATIVE_TIMES", "1")
    executable = compiled(tiny_model(num_layers=2), "cpu-native", precision=precision_of("bf16"))
    prefill(executable, [3, 4])
    executable.close()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "native: 1 steps, microseconds a step"
    counts = {line.split(" x ")[1]: int(line.split()[1]) for line in said[1:]}
    assert counts["attend"] == 2 and counts["linear model.layers.*.mlp.down_proj.weight"] == 2
    assert all(float(line.split()[0]) > 0 for line in said[1:])


def test_more_threads_than_cores_are_allowed_and_said() -> None:
    model, num_cores = tiny_model(num_layers=1), describe_cpu().num_cores
    given = {"precision": precision_of("bf16"), "num_threads": num_cores + 1}
    executable = compiled(model, "cpu-native", **given)
    said = f"{num_cores + 1} threads on {num_cores} cores"
    assert str(executable.device_detail).endswith(said)
    assert prefill(executable, [3, 4]).isfinite().all()
    executable.close()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))  # no kernels in the package
    build.library_path.cache_clear()
    said = r"no C\+\+ compiler \(CXX='no-such-compiler' is not found\); allowed: --backend onn"
    with pytest.raises(CompileError, match=said):
        build.library_path()
    build.library_path.cache_clear()
