"""The native cpu backend: exact values, a row's bits, what it refuses."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import grid
from tests.targets.native_checks import (
    HELD,
    WIDER,
    check_exact,
    check_instruction_sets,
    check_rows_alone,
    mapped_of,
    native,
    written,
)
from tests.targets.test_conformance import EXACT, SHAPES, assert_near, shaped, tokens_of
from tests.tiny import (
    compiled,
    leave_seat,
    lowered,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_seat,
    tiny_model,
)
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.driver import weight_source
from tilewright.compiler.errors import CheckpointError, CompileError
from tilewright.compiler.formats import get_format
from tilewright.compiler.targets.base import CompileOptions, Executable
from tilewright.compiler.targets.cpu.native import build, library, numerics, room
from tilewright.compiler.targets.cpu.native.assemble import assemble
from tilewright.compiler.targets.cpu.native.mapping import WEIGHTS
from tilewright.compiler.targets.cpu.native.packed import program_of
from tilewright.compiler.targets.cpu.native.room import check_room, kept_bytes, position_bytes
from tilewright.compiler.targets.program.instructions import Needs, Plan
from tilewright.compiler.targets.program.plan import make_plan
from tilewright.compiler.targets.step import Copy, Step

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

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
    """Whatever the format: its values are held exactly."""
    name, axis, others = held
    model = shaped(shape)
    tokens = tokens_of(model, 19)
    precision = precision_of(name, block_axis=axis, **others)
    check_exact(model, tokens, precision, [17, 1])


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral", "phi3", "qwen3"])
def test_dense_architectures_are_the_reference(model_type: str) -> None:
    """Windows, norms of heads and after mixers, caps, parts that turn with a factor."""
    changes = importlib.import_module(f"tests.models.test_{model_type}").ON_CUDA
    small = {"num_layers": 1, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}
    model = tiny_model(std=0.2, model_type=model_type, **{"hidden_size": 16, **small, **changes})
    tokens, precision = random_tokens(40), precision_of("bf16")
    check_exact(model, tokens, precision, [6, 1, 20])


@pytest.mark.parametrize(("name", "fidelity"), FAST)
def test_every_instruction_set_has_the_same_bits(name: str, fidelity: str, tmp_path: Path) -> None:
    """Also a row's bits on one thread and on three, and however its prompt was cut."""
    model, tokens = tiny_model(std=0.2, hidden_size=48, head_dim=24), random_tokens(21)
    cache = "bfp8" if fidelity == "lofi" else "bf16"
    precision = precision_of(name, fidelity, **WIDER | {"kv_cache": cache})
    check_instruction_sets(model, tokens, precision, tmp_path)


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
    """The same bits alone and among any number of others, in any of the places."""
    check_rows_alone(many, count, seed)


def test_long_contexts_are_merged_as_one(tmp_path: Path) -> None:
    """More positions than are attended to at once, and more tokens than a step computes at once."""
    model = tiny_model(std=0.2, num_layers=1, max_positions=2048, hidden_size=16, num_heads=2)
    tokens = random_tokens(1100)
    precision = precision_of("fp32")
    expected = prefill(compiled(model, precision=precision, max_context=2048), tokens)
    executable = compiled(model, "cpu-native", precision=precision, max_context=2048)
    whole = prefill(executable, tokens)
    assert_near(whole, expected, EXACT)
    assert torch.equal(prefill(executable, tokens, [511, 2, 300]), whole)
    executable.close()


@pytest.mark.parametrize("cache", ["fp32", "bf16", "bfp8"])
def test_long_contexts_have_the_same_bits_on_any_number_of_threads(
    cache: str, tmp_path: Path
) -> None:
    """Attention is split over threads where one key/value head sees many positions: of a layer with
    a window and of one without, of a row alone, beside short ones and as a prompt's last.
    """
    sizes = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "max_positions": 2048}
    kinds = {"model_type": "gemma3_text", "windows": (700, 0), "attention_cap": 1.5}
    model = tiny_model(std=0.2, **sizes, **kinds)
    tokens, precision = random_tokens(1100), precision_of("bf16", kv_cache=cache)
    found, best = [], library.library().tw_best_isa()
    for isa, num_threads in [(-1, 1), (-1, 2), (-1, 5), (min(1, best), 3)]:
        executable = native(
            model, precision, tmp_path, isa=isa, num_threads=num_threads, batch=3, context=1200
        )
        seats = [take_seat(executable, 1200) for _ in range(3)]
        for seat, length in zip(seats, (1097, 5, 600), strict=True):
            step(executable, [(seat, tokens[:length], 0)])
        rows = [step(executable, [(seats[0], tokens[at : at + 1], at)]) for at in (1097, 1098)]
        rows.append(step(executable, [(seats[i], [9], at) for i, at in enumerate((1099, 5, 600))]))
        found.append(torch.cat(rows))
        whole = step(executable, [(seats[1], [*tokens[:1099], 9], 0)])
        assert torch.equal(whole[-1], found[-1][2])
        executable.close()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("windows", [(64, 64), (64, 0)], ids=str)
def test_what_windows_have_passed_is_given_back(windows: tuple[int, int]) -> None:
    """A sequence of a hundred windows holds the last of them, and what it may be cut back; layers
    without a window hold all. The results are the reference's, and behind a copy the same bits.
    """
    sizes = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    model = tiny_model(
        std=0.2, model_type="gemma3_text", windows=windows, max_positions=8192, **sizes
    )
    tokens, count = random_tokens(6500), 6400
    made = {"max_context": 8192, "max_batch": 2, "num_threads": 2}
    executable = compiled(model, "cpu-native", precision=precision_of("fp32"), **made)
    expected = prefill(compiled(model, precision=precision_of("fp32"), **made), tokens[:1300])
    assert_near(prefill(executable, tokens[:1300], [1200, 50])[-1:], expected[-1:], EXACT)
    seat, other = take_seat(executable), take_seat(executable)
    before = _resident()
    step(executable, [(seat, tokens[:count], 0)])
    held = sum(2 * 4 * 64 * 4 * (each + 1024 if each else count) for each in windows)
    assert held <= executable.memory().state < 1.01 * held
    assert 0.8 * held < _resident() - before < held + (3 << 20)
    executable.step(Step(edits=(Copy(seat, other, count - 500),)))
    again = step(executable, [(other, tokens[count - 500 : count + 1], count - 500)])
    assert torch.equal(step(executable, [(seat, tokens[count : count + 1], count)])[-1], again[-1])
    with pytest.raises(AssertionError, match="does not fit"):
        step(executable, [(seat, tokens[:2], count - 2000)])
    assert executable.capabilities.can_cut(count, count - 500)
    assert not executable.capabilities.can_cut(count, count - 2000)
    step(executable, [(seat, tokens[:1300], 0)])
    executable.close()


def _resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_what_a_seat_held_before_weighs_nothing() -> None:
    """Not even where it was no number: here one token alone makes values that overflow."""
    model = tiny_model(std=0.2, num_layers=1)
    tensors = model.checkpoint.tensors
    tensors["model.embed_tokens.weight"][:, 0] = 0.0
    tensors["model.embed_tokens.weight"][60, 0] = 100.0
    tensors["model.layers.0.self_attn.v_proj.weight"][:, 0] = 1e38
    executable = compiled(model, "cpu-native", precision=precision_of("bf16"), compute="fast")
    for tail in ([9, 10], [9, 10, 11]):
        expected = prefill(executable, [5, 6, 7, *tail])[-1]
        seat = take_seat(executable, 20)
        assert not step(executable, [(seat, [5, 6, 7, 60, 60, 60, 8], 0)]).isfinite().all()
        assert torch.equal(step(executable, [(seat, tail, 3)])[-1], expected)
        leave_seat(executable, seat)
    executable.close()


def test_a_closed_program_is_not_handed_to_the_library() -> None:
    """Which would read from address nought, and end the process."""
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
    plan = make_plan(
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
    """Any number of any structure changed: the library says no, or what it opens is within its
    memory.
    """
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
    """The ``index``-th of the fields of a structure that are integers."""
    integers = ctypes.c_int32, ctypes.c_uint32
    fields = [field[0] for field in structure._fields_ if field[1] in integers]
    name = fields[index % len(fields)]
    if name in ("num_instructions", "num_tensors", "num_buffers", "num_states"):
        value = min(value, getattr(structure, name))  # the arrays are no longer than they are
    if name != "num_threads" or value < 4096:
        setattr(structure, name, value)


_KEPT: list[object] = []


def _plan() -> Plan:
    model = tiny_model(num_layers=1)
    return make_plan(
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
    """Sequences at these positions, or positions of these sequences: both are allowed then."""
    states = assemble(_plan(), exact=False).states
    seat = kept_bytes(states) + 64 * position_bytes(states)
    with pytest.raises(CompileError, match=r"up to 5 sequences .* or up to 64 positions") as said:
        check_room(states, 8, 100, 11 * seat)
    assert "\n" not in str(said.value) and "8 sequences of 100 positions keep" in str(said.value)
    check_room(states, 5, 100, 11 * seat)
    check_room(states, 8, 64, 11 * seat)
    with pytest.raises(CompileError, match="allowed: a machine with more memory"):
        check_room(states, 1, 64, seat - 1)
    windowed = [64] * len(states)  # 1,088 positions of them are held, however many there are
    check_room(states, 1, 100_000, kept_bytes(states) + 1088 * position_bytes(states), windowed)


@pytest.mark.parametrize("precision", ["bfp4", "bf16"])
def test_weights_on_large_pages_are_the_same(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has its own then: what was mapped is let go, and the file may be gone. Those of
    bf16 are held in 12 bits, a few values apart, for one row, for some, and for many.
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
    assert executable._mapped is None
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


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library_path.cache_clear()
    said = r"no C\+\+ compiler \(CXX='no-such-compiler' is not found\); allowed: --backend onn"
    with pytest.raises(CompileError, match=said):
        build.library_path()
    build.library_path.cache_clear()


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "gemma3_text", "windows": (70, 0)}], ids=["all", "windows"]
)
def test_caches_in_blocks_have_the_bits_of_their_values(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfp8 a position takes 17 bytes for 16 values, and a row has the bits that the same values
    in bfloat16 give: whole prompts, ragged pieces, behind a prefix of another seat, in windows;
    heads of whole blocks and with a part of one, values near the smallest and zeros included.
    """
    sizes = {"hidden_size": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "num_layers": 2}
    model = tiny_model(std=0.2, max_positions=2048, **sizes, **changes)
    _ruin(model.checkpoint.tensors)
    tokens, made = random_tokens(700), {"max_context": 1024, "max_batch": 3, "compute": "fast"}
    precision, found = precision_of("bf16", kv_cache="bfp8"), []
    for held in ("bfp8", "bf16"):
        monkeypatch.setitem(numerics._CACHES, "bfp8", (held, 7))
        executable = compiled(model, "cpu-native", precision=precision, num_threads=2, **made)
        whole = prefill(executable, tokens)
        assert torch.equal(prefill(executable, tokens, [3, 66, 1, 129, 1, 1, 5]), whole)
        source, target = take_seat(executable, 900), take_seat(executable, 900)
        step(executable, [(source, tokens[:650], 0)])
        executable.step(Step(edits=(Copy(source, target, 601),)))
        both = step(executable, [(target, tokens[601:], 601), (source, tokens[650:], 650)])
        assert torch.equal(both, whole[[-1, -1]])
        found.append((whole, executable.state_bytes(64)))
        executable.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] * 32 == found[1][1] * 17


def _ruin(tensors: dict[str, torch.Tensor]) -> None:
    """Channels of keys and values that are zeros, tiny, or of very unequal sizes in a block."""
    for name in ("k_proj", "v_proj"):
        weight = tensors[f"model.layers.0.self_attn.{name}.weight"]
        weight[:16] = 0.0
        weight[24:30] *= 1e-36
        weight[30:32] *= 1e6 if name == "v_proj" else 10.0


@pytest.mark.parametrize("name", ["bfp8", "bfp4"])
def test_keys_and_values_are_rounded_as_the_format_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference with a cache of such values is near; without, it is not."""
    model, tokens = tiny_model(std=0.2, num_layers=1), random_tokens(24)
    precision = precision_of("fp32", "hifi4fp32", kv_cache=name)
    executable = compiled(model, "cpu-native", precision=precision, compute="fast")
    found = prefill(executable, tokens)
    executable.close()
    plain = prefill(compiled(model, precision=precision), tokens)
    attention = importlib.import_module("tilewright.compiler.ops.attention")
    cached = attention._attend_cached
    held = get_format(name).round_trip

    def rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        return cached(q, held(k), held(v), *rest)

    monkeypatch.setattr(attention, "_attend_cached", rounded)
    near = (found - prefill(compiled(model, precision=precision), tokens)).abs().max()
    assert near < 0.02
    assert (found - plain).abs().max() > 2 * near
