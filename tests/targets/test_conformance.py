"""What executables that compute must do: cpu as the reference, which is as transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import grid
from tests.tiny import (
    QWEN2,
    compiled,
    copy_slot,
    leave_slot,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tests.twins import twin_of
from tilewright.compiler.targets.interface.base import Executable
from tilewright.models.config import Llama3Scaling, RopeConfig

SCALED = RopeConfig(theta=500.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 16))
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one_kv_head": {"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, "tie_embeddings": False},
    "biases": {
        **{"num_kv_heads": 4, "vocab_size": 7},
        **{"attention_bias": True, "output_bias": True, "mlp_bias": True},
    },
    "ragged": {"hidden_size": 40, "intermediate_size": 56, "head_dim": 48, "vocab_size": 131},
    "wide_heads": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "num_layers": 1},
    "scaled_rope": {"rope": SCALED, "head_dim": 32, "norm_eps": 1e-3},
    "qwen2": QWEN2,
    "qwen2_untied": {
        **QWEN2,
        **{"rope": RopeConfig(theta=1e6), "norm_eps": 1e-6, "tie_embeddings": False},
        **{"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, "vocab_size": 131},
    },
}
FORMATS = ("fp32", "bf16", "bfp8", "bfp4")
HELD = [*((name, "in") for name in FORMATS), ("bfp8", "out"), ("bfp4", "out")]
"""Formats, and the axis along which their blocks lie."""


def shaped(name: str) -> SimpleNamespace:
    return tiny_model(std=0.2, **SHAPES[name])


def tokens_of(model: SimpleNamespace, count: int, seed: int = 0) -> list[int]:
    return random_tokens(count, vocab_size=model.config.vocab_size, seed=seed)


def assert_near(got: torch.Tensor, expected: torch.Tensor, within: float = 1e-4) -> None:
    """The largest difference, where logits are of the order of 1."""
    assert 0.1 < expected.std() < 30
    torch.testing.assert_close(got, expected, atol=within, rtol=0)


@pytest.mark.parametrize(("shape", "held"), grid([(each,) for each in SHAPES], HELD))
def test_cpu_exact_is_the_reference(shape: str, held: tuple[str, str]) -> None:
    name, axis = held
    model = shaped(shape)
    tokens = tokens_of(model, 19)
    precision = precision_of(name, block_axis=axis)
    expected = prefill(compiled(model, precision=precision), tokens)
    cpu = compiled(model, "cpu", precision=precision)
    assert_near(prefill(cpu, tokens), expected)
    assert_near(prefill(cpu, tokens, [17, 1]), expected)
    cpu.close()


def test_formats_differ() -> None:
    """So that the agreement above means something."""
    model = shaped("grouped")
    tokens = tokens_of(model, 9)
    found = [prefill(compiled(model, precision=precision_of(name)), tokens) for name in FORMATS]
    distances = [float((logits - found[0]).abs().max()) for logits in found]
    assert distances[0] < 1e-3 < distances[1] < distances[2] * 2 < distances[3]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_transformers(shape: str) -> None:
    model = shaped(shape)
    tokens = tokens_of(model, 40)
    with torch.no_grad():
        expected = twin_of(model.config, model.checkpoint.tensors)(torch.tensor([tokens])).logits[0]
    assert_near(prefill(compiled(model), tokens), expected)


EXACT, INT8, BOARD = 1e-4, 0.1, 0.25
"""Rounding to int8 turns differences in the last bit into a step of the grid, here and there.

Boards write bfp8 in prefill where they write bfloat16 in decode; what is equal to the last bit
there is in tests/targets/tenstorrent/test_executable.py.
"""

BOARDS = ("n150", "n300")
EXECUTABLES: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "reference": ("reference", "bfp8", "hifi4", "exact", {}),
    "reference_qwen2": ("reference", "bfp8", "hifi4", "exact", QWEN2),
    "cpu_exact": ("cpu", "bfp8", "hifi4", "exact", {}),
    "cpu_exact_qwen2": ("cpu", "bfp8", "hifi4", "exact", QWEN2),
    "cpu_int8": ("cpu", "bfp8", "lofi", "fast", {}),
    "cpu_int8_4_bits": ("cpu", "bfp4", "lofi", "fast", {}),
    "native_exact": ("cpu-native", "bfp8", "hifi4", "exact", {}),
    "native_exact_qwen2": ("cpu-native", "bfp8", "hifi4", "exact", QWEN2),
    "native_int8": ("cpu-native", "bfp8", "lofi", "fast", {}),
    "native_int8_4_bits": ("cpu-native", "bfp4", "lofi", "fast", {}),
    "n150": ("n150", "bfp8", "hifi4", "fast", {}),
    "n300_qwen2": ("n300", "bfp8", "hifi2", "fast", QWEN2),
}


@pytest.fixture(scope="module", params=EXECUTABLES)
def executable(request: pytest.FixtureRequest) -> Executable:
    target, name, fidelity, compute, architecture = EXECUTABLES[request.param]
    model = tiny_model(std=0.2, **architecture)
    table = {"embedding": "bf16"} if target in BOARDS else {}
    precision = precision_of(name, fidelity, **table)
    return compiled(model, target, precision=precision, compute=compute)


@pytest.fixture(scope="module")
def within(executable: Executable) -> float:
    if executable.device_name.lower() in BOARDS:
        return BOARD
    values = {entry.meaning.effective for entry in executable.contract.entries}
    return INT8 if any("int8 activations" in each for each in values) else EXACT


def test_prefill_is_token_by_token(executable: Executable, within: float) -> None:
    tokens = random_tokens(13)
    assert_near(prefill(executable, tokens, [1] * 12), prefill(executable, tokens), within)


@settings(max_examples=6)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_chunks_of_any_size_are_the_whole(
    executable: Executable, within: float, sizes: list[int]
) -> None:
    tokens = random_tokens(sum(sizes) + 1, seed=sum(sizes))
    assert_near(prefill(executable, tokens, sizes), prefill(executable, tokens), within)


def test_mixed_lengths_are_one_at_a_time(executable: Executable, within: float) -> None:
    """Four sequences of different lengths decode together, in any order, as each does alone."""
    prompts = [random_tokens(count, seed=count) for count in (5, 1, 17, 9)]
    tails = [random_tokens(4, seed=100 + index) for index in range(4)]
    alone = [
        prefill(executable, prompt + tail, [len(prompt)])[-4:]
        for prompt, tail in zip(prompts, tails, strict=True)
    ]
    handles = [take_slot(executable, 40) for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        step(executable, [(handle, prompt, 0)])
    for at, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0], [1, 0, 2, 3])):
        logits = step(
            executable,
            [(handles[i], tails[i][at : at + 1], len(prompts[i]) + at) for i in order],
        )
        for row, i in enumerate(order):
            assert_near(logits[row], alone[i][at], within)
    for handle in handles:
        leave_slot(executable, handle)


def test_some_rows_only_are_asked_for(executable: Executable, within: float) -> None:
    tokens = random_tokens(8)
    every = prefill(executable, tokens)
    handle = take_slot(executable, 8)
    assert_near(step(executable, [(handle, tokens, 0)], rows=[7, 2]), every[[7, 2]], within)
    leave_slot(executable, handle)


def test_no_rows_are_asked_for(executable: Executable, within: float) -> None:
    """A chunk in the middle of a prompt needs no logits."""
    tokens = random_tokens(9)
    every = prefill(executable, tokens)
    handle = take_slot(executable, 9)
    assert step(executable, [(handle, tokens[:4], 0)], rows=[]).shape == (0, 61)
    assert step(executable, [(handle, tokens[4:5], 4)], rows=[]).shape == (0, 61)
    assert_near(step(executable, [(handle, tokens[5:], 5)]), every[-1:], within)
    leave_slot(executable, handle)


def test_a_copy_shares_its_past_and_goes_its_own_way(executable: Executable, within: float) -> None:
    prompt, left, right = random_tokens(9), random_tokens(5, seed=1), random_tokens(5, seed=2)
    handle = take_slot(executable, 20)
    step(executable, [(handle, [*prompt, 3, 4], 0)])
    fresh = copy_slot(executable, handle, len(prompt))
    assert fresh != handle
    for sequence, tail in ((handle, [3, 4, *left]), (fresh, right)):
        done = 11 if sequence == handle else 9
        logits = step(executable, [(sequence, (prompt + tail)[done:], done)])
        assert_near(logits, prefill(executable, prompt + tail)[-1:], within)
    leave_slot(executable, handle)
    logits = step(executable, [(fresh, [5], 14)])
    assert_near(logits, prefill(executable, [*prompt, *right, 5])[-1:], within)
    leave_slot(executable, fresh)


def test_a_slot_can_be_used_again(executable: Executable, within: float) -> None:
    first, second = random_tokens(20), random_tokens(6, seed=5)
    expected = prefill(executable, second)
    prefill(executable, first)
    assert_near(prefill(executable, second), expected, within)
