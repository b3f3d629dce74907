"""State that does not grow, on the CPU: whose it is, when it counts, and what a program keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from tests import architecture_checks as checks
from tests.models.test_qwen3_5_moe import make
from tests.tiny import (
    compiled,
    copy_slot,
    leave_slot,
    lowered,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.driver import weight_source
from tilewright.compiler.ir.serialise import graph_json, read_graph
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.targets.cpu.onnxruntime.executable import CpuExecutable
from tilewright.compiler.targets.cpu.onnxruntime.generate import generate
from tilewright.compiler.targets.cpu.onnxruntime.model_file import open_model, write_model
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, Slot
from tilewright.errors import CheckpointError

OPTIONS = CompileOptions(max_batch=3, max_context=64, compute="exact", num_threads=1)
LINEAR: dict[str, Any] = {"linear_layers": (True, True), "num_layers": 2}


@pytest.fixture(scope="module")
def model() -> SimpleNamespace:
    found: SimpleNamespace = make()
    return found


def states_of(executable: Executable, handle: Slot) -> list[np.ndarray]:
    assert isinstance(executable, CpuExecutable)
    return executable._states.read(handle)


def started(executable: Executable, lengths: tuple[int, ...]) -> list[Slot]:
    """Sequences that have run so many random tokens each."""
    handles = [take_slot(executable, 40) for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        step(executable, [(handle, random_tokens(length, seed=length), 0)])
    return handles


def test_a_sequence_that_is_not_stepped_keeps_its_state(model: SimpleNamespace) -> None:
    """Though its row inside the window is run with the others'."""
    executable = compiled(model, "cpu")
    handles = started(executable, (4, 11, 7))
    before = states_of(executable, handles[1])
    assert all(piece.any() for piece in before)
    for at, token in enumerate(random_tokens(6, seed=77)):
        step(executable, [(handles[i], [token], (4, 11, 7)[i] + at) for i in (0, 2)])
    after = states_of(executable, handles[1])
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    got = step(executable, [(handles[1], [3, 1, 4], 11)])
    expected = prefill(executable, [*random_tokens(11, seed=11), 3, 1, 4])[-1:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    executable.close()


def test_position_0_begins_anew_whatever_is_in_the_slot(model: SimpleNamespace) -> None:
    """In a prompt and in a single token, without giving the slot back."""
    executable = compiled(model, "cpu")
    tokens = random_tokens(6)
    alone = prefill(executable, tokens)
    (handle,) = started(executable, (9,))
    assert all(piece.any() for piece in states_of(executable, handle))
    for size in (6, 1, 5):
        found = [step(executable, [(handle, tokens[:size], 0)])]
        found += [step(executable, [(handle, [t], size + i)]) for i, t in enumerate(tokens[size:])]
        torch.testing.assert_close(torch.cat(found), alone[size - 1 :], atol=1e-4, rtol=1e-4)
    executable.close()


def test_state_may_come_out_where_it_went_in(model: SimpleNamespace, tmp_path: Path) -> None:
    """The session reads and writes one memory: bit for bit what two would give."""
    graph_module, _ = lowered(model)
    write_model(graph_module, weight_source(model, 64), tmp_path, OPTIONS, lambda *_: None)
    session = open_model(tmp_path, OPTIONS).session
    tokens, start = random_tokens(20), 0
    kept = {
        each.name: np.zeros((1, *(64 if n == "L" else n for n in each.shape[1:])), np.float32)
        for each in session.get_inputs()
        if each.name.endswith((".key", ".value", ".state"))
    }
    shared = {name: array.copy() for name, array in kept.items()}
    for size in (9, 1, 1, 6, 1, 2):
        inputs = {
            "tokens": np.array([tokens[start : start + size]], dtype=np.int64),
            "last_positions": np.array([start + size - 1], dtype=np.int32),
            "total_length": np.array(start + size, dtype=np.int32),
            "logit_rows": np.arange(size, dtype=np.int64),
        }
        start += size
        outputs = session.run(["logits", *(f"{name}.out" for name in kept)], {**inputs, **kept})
        kept = dict(zip(kept, outputs[1:], strict=True))
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in shared.items():
            place = "cpu", 0, np.float32, array.shape, array.ctypes.data
            binding.bind_input(name, *place)
            binding.bind_output(f"{name}.out", *place)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        assert np.array_equal(binding.copy_outputs_to_cpu()[-1], outputs[0])
        for name, array in kept.items():
            if name.endswith(".state"):
                assert np.array_equal(shared[name], array) and array.any(), name


def test_copies_are_of_everything_or_refused(model: SimpleNamespace) -> None:
    checks.check_snapshots(model, "cpu")
    executable = compiled(model, "cpu")
    (handle,) = started(executable, (9,))
    for count in (1, 8):
        copied = copy_slot(executable, handle, count)
        with pytest.raises(AssertionError, match=f"{count} is not where its state is"):
            step(executable, [(copied, [5, 6], count)])
        leave_slot(executable, copied)
    executable.close()


def test_memory_counts_what_each_sequence_keeps(model: SimpleNamespace) -> None:
    executable = compiled(model, "cpu")
    delta = model.config.delta
    heads, width = delta.num_value_heads, delta.conv_width - 1
    own = 4 * 3 * (heads * delta.key_dim * delta.value_dim + delta.qkv_width * width)
    a_position = 4 * 2 * model.config.num_kv_heads * model.config.head_dim
    assert executable.state_bytes(5) == own + 5 * a_position
    assert executable.memory().state == 0
    handles = started(executable, (4, 7))
    take_slot(executable, 10)
    assert executable.memory().state == 2 * own + 11 * a_position
    leave_slot(executable, handles[0])
    assert executable.memory().state == own + 7 * a_position
    assert not any(piece.any() for piece in states_of(executable, handles[0]))
    assert all(piece.any() for piece in states_of(executable, handles[1]))
    executable.close()


def test_the_cpu_holds_what_transformers_computes_over_150_tokens(model: SimpleNamespace) -> None:
    executable, tokens = compiled(model, "cpu", max_context=160), random_tokens(150)
    expected = checks.their_logits(model, tokens)
    for sizes in ([], [1] * 150, [64, 1, 63]):
        got = prefill(executable, tokens, sizes)
        torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)
    executable.close()


def test_without_attention_there_is_no_cache(model: SimpleNamespace) -> None:
    """All state is of sequences; nothing tells how long they are but the step."""
    shape = {"delta": model.config.delta, "rope": model.config.rope}
    linear = tiny_model(std=0.2, model_type="qwen3_5", head_dim=32, **shape, **LINEAR)
    executable, tokens = compiled(linear, "cpu"), random_tokens(21)
    expected = prefill(compiled(linear), tokens)
    for sizes in ([], [3, 1, 1, 9]):
        got = prefill(executable, tokens, sizes)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    executable.close()


def test_the_script_beside_a_program_runs_it(model: SimpleNamespace, tmp_path: Path) -> None:
    graph_module, _ = lowered(model)
    write_model(graph_module, weight_source(model, 64), tmp_path, OPTIONS, lambda *_: None)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    prompt = random_tokens(7)
    found = list(generate(session, prompt, 8))
    logits = prefill(compiled(model), [*prompt, *found])
    assert found == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_program_without_what_comes_out_is_refused(
    model: SimpleNamespace, tmp_path: Path
) -> None:
    import onnx

    graph_module, _ = lowered(model)
    write_model(graph_module, weight_source(model, 64), tmp_path, OPTIONS, lambda *_: None)
    path = tmp_path / "model.onnx"
    assert [each.shape for each in open_model(tmp_path, OPTIONS).states][:2] == [
        (3, model.config.delta.qkv_width),
        (4, 16, 16),
    ]
    proto: Any = onnx.load(path, load_external_data=False)
    (last,) = [
        each for each in proto.graph.output if each.name.endswith("2.linear_attn.memory.state.out")
    ]
    proto.graph.output.remove(last)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError, match="not a program of the cpu target"):
        open_model(tmp_path, OPTIONS)


def test_a_folders_graph_is_read_back(model: SimpleNamespace) -> None:
    """With inputs whose names FX spells in its own way, such as A_log."""
    graph_module, _ = lowered(model)
    data = graph_json(graph_module)
    assert b"A_log" in data
    back = read_graph(data, Path("graph.json"))
    assert graph_text(back.graph) == graph_text(graph_module.graph)
    assert graph_json(back) == data
