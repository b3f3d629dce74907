"""Experts and linear attention on the native cpu backend: values, bits, and state."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import architecture_checks as checks
from tests.grids import grid
from tests.models.test_qwen3_5_moe import make
from tests.targets.cpu.native.native_checks import (
    HELD,
    WIDER,
    check_exact,
    check_instruction_sets,
    check_rows_alone,
)
from tests.targets.test_conformance import EXACT, assert_near
from tests.tiny import (
    compiled,
    precision_of,
    prefill,
    random_tokens,
    tiny_model,
)
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.interface.base import Executable

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

MIXERS = ("qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
EXPERTS: list[dict[str, Any]] = [
    {},
    {"experts_per_token": 1, "num_experts": 3},
    {"experts_per_token": 5, "num_experts": 5, "expert_size": 40, "hidden_size": 72},
]


def small(model_type: str, **changes: Any) -> SimpleNamespace:
    """Return a model with a layer or two, with sizes that are not whole blocks."""
    known = importlib.import_module(f"tests.models.test_{model_type}").ON_CUDA
    sizes = {"num_layers": 1, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}
    sizes = {"hidden_size": 24, **sizes, **known, **changes}
    return tiny_model(std=0.2, model_type=model_type, **sizes)


@pytest.mark.parametrize("model_type", MIXERS)
def test_the_architecture_is_the_reference(model_type: str) -> None:
    """Also with other chunk ends, with equal bits."""
    model, tokens, precision = small(model_type), random_tokens(43), precision_of("bf16")
    expected = prefill(compiled(model, precision=precision), tokens)
    executable = compiled(model, "cpu-native", precision=precision)
    whole = prefill(executable, tokens)
    assert_near(whole, expected, EXACT)
    for cuts in ([1] * 42, [6, 1, 20], [2, 1, 1, 37]):
        assert torch.equal(prefill(executable, tokens, cuts), whole)
    executable.close()


@pytest.mark.parametrize(("changes", "held"), grid([(each,) for each in EXPERTS], HELD))
def test_experts_are_held_exactly(
    changes: dict[str, Any], held: tuple[str, str, dict[str, str]]
) -> None:
    """For all formats, sizes and numbers of experts."""
    name, axis, others = held
    model, tokens = small("qwen3_moe", **changes), random_tokens(19)
    precision = precision_of(name, block_axis=axis, **others)
    check_exact(model, tokens, precision, [17, 1])


def test_gate_and_up_of_unequal_formats_are_apart() -> None:
    model, tokens = small("qwen3_moe"), random_tokens(19)
    precision = precision_of("bfp8", layers="*.experts.up_proj: {experts_ff1_3: bf16}")
    check_exact(model, tokens, precision, [17, 1])


@pytest.mark.parametrize(
    ("model_type", "name", "fidelity"),
    [("qwen3_moe", "bfp4", "lofi"), ("qwen3_5_moe", "q80", "hifi4"), ("qwen3_next", "q41", "lofi")],
)
def test_every_instruction_set_has_the_same_bits(
    model_type: str, name: str, fidelity: str, tmp_path: Path
) -> None:
    """Also for several threads and any chunks."""
    model, tokens = small(model_type), random_tokens(21)
    precision = precision_of(name, fidelity, **WIDER)
    check_instruction_sets(model, tokens, precision, tmp_path)


@pytest.fixture(scope="module")
def many() -> Executable:
    precision = precision_of("bfp4", "lofi", **WIDER)
    model = small("qwen3_5_moe")
    return compiled(model, "cpu-native", precision=precision, compute="fast", max_batch=40)


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_rows_beside_it(
    many: Executable, count: int, seed: int
) -> None:
    """Bits are equal with and without other rows, at any position."""
    check_rows_alone(many, count, seed)


def test_sequences_keep_their_state_to_themselves() -> None:
    """Different lengths, any order, reused slots and copies."""
    checks.check_mixed_lengths(make(), "cpu-native")
    checks.check_snapshots(make(), "cpu-native")
    checks.check_random_operations(make("unequal_sizes"), "cpu-native")


def test_a_router_without_numbers_gives_none() -> None:
    """NaN logits select existing experts and are reported."""
    model = small("qwen3_moe")
    model.checkpoint.tensors["model.embed_tokens.weight"][60, 0] = 3e38
    executable = compiled(model, "cpu-native", precision=precision_of("bf16"), compute="fast")
    expected = prefill(executable, [5, 6])
    assert not prefill(executable, [5, 60, 7]).isfinite().all()
    assert torch.equal(prefill(executable, [5, 6]), expected)
    executable.close()
