"""KV caches on the native cpu backend: long contexts, windows, block formats."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.targets.cpu.native.native_checks import native
from tests.targets.cpu.resident import collected, resident_bytes
from tests.targets.test_conformance import EXACT, assert_near
from tests.tiny import compiled, precision_of, prefill, random_tokens, step, take_slot, tiny_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.targets.cpu.native import numerics
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.interface.step import CopyState, Step

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


def test_long_contexts_are_merged_as_one(tmp_path: Path) -> None:
    """The context exceeds the positions per pass, and the prompt exceeds the tokens per step."""
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
    """A long context splits a key/value head over threads.

    Layers have a window or full attention. The row is single, with short rows, or last in a prompt.
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
        slots = [take_slot(executable, 1200) for _ in range(3)]
        for slot, length in zip(slots, (1097, 5, 600), strict=True):
            step(executable, [(slot, tokens[:length], 0)])
        rows = [step(executable, [(slots[0], tokens[at : at + 1], at)]) for at in (1097, 1098)]
        rows.append(step(executable, [(slots[i], [9], at) for i, at in enumerate((1099, 5, 600))]))
        found.append(torch.cat(rows))
        whole = step(executable, [(slots[1], [*tokens[:1099], 9], 0)])
        assert torch.equal(whole[-1], found[-1][2])
        executable.close()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("windows", [(64, 64), (64, 0)], ids=str)
def test_what_windows_have_passed_is_given_back(windows: tuple[int, int]) -> None:
    """A long sequence stores the last window and the rollback positions.

    Layers without windows store all. Results equal the reference, and a copy has equal bits.
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
    slot, other = take_slot(executable), take_slot(executable)
    with collected():
        before = resident_bytes()
        step(executable, [(slot, tokens[:count], 0)])
        grown = resident_bytes() - before
    held = sum(2 * 4 * 64 * 4 * (each + 1024 if each else count) for each in windows)
    assert held <= executable.memory().state < 1.01 * held
    assert 0.8 * held < grown < held + (3 << 20)
    executable.step(Step(edits=(CopyState(slot, other, count - 500),)))
    again = step(executable, [(other, tokens[count - 500 : count + 1], count - 500)])
    assert torch.equal(step(executable, [(slot, tokens[count : count + 1], count)])[-1], again[-1])
    with pytest.raises(AssertionError, match="does not fit"):
        step(executable, [(slot, tokens[:2], count - 2000)])
    assert executable.capabilities.can_cut(count, count - 500)
    assert not executable.capabilities.can_cut(count, count - 2000)
    step(executable, [(slot, tokens[:1300], 0)])
    executable.close()


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "gemma3_text", "windows": (70, 0)}], ids=["all", "windows"]
)
def test_caches_in_blocks_have_the_bits_of_their_values(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfp8, 16 values take 17 bytes.

    A row has the bits of equal values in bfloat16, for whole prompts, ragged chunks, a prefix from
    another slot, windows, partial blocks, tiny values and zeros.
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
        source, target = take_slot(executable, 900), take_slot(executable, 900)
        step(executable, [(source, tokens[:650], 0)])
        executable.step(Step(edits=(CopyState(source, target, 601),)))
        both = step(executable, [(target, tokens[601:], 601), (source, tokens[650:], 650)])
        assert torch.equal(both, whole[[-1, -1]])
        found.append((whole, executable.state_bytes(64)))
        three = 2 * executable.state_bytes(300) + executable.state_bytes(301)
        assert executable.state_bytes(901, 3) == three, "a window is each sequence's own"
        executable.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] * 32 == found[1][1] * 17


def test_caches_in_blocks_have_equal_bits_on_every_instruction_set(tmp_path: Path) -> None:
    """Up to six rows unpack blocks in registers. Single tokens end at 36 neighboring lengths."""
    sizes = {"hidden_size": 48, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "num_layers": 2}
    model, tokens = tiny_model(std=0.2, max_positions=512, **sizes), random_tokens(200)
    _ruin(model.checkpoint.tensors)
    precision, first = precision_of("bf16", kv_cache="bfp8"), None
    for isa in range(library.library().tw_best_isa() + 1):
        executable = native(model, precision, tmp_path, isa=isa, context=256)
        for cuts in ([], [95, *[1] * 36, 2, 3, 27, 2]):
            whole = prefill(executable, tokens, cuts)
            first = whole if first is None else first
            assert torch.equal(whole, first), (isa, cuts)
        executable.close()


def _ruin(tensors: dict[str, torch.Tensor]) -> None:
    """Set channels of keys and values to zeros, tiny values, or very unequal values in a block."""
    for name in ("k_proj", "v_proj"):
        weight = tensors[f"model.layers.0.self_attn.{name}.weight"]
        weight[:16] = 0.0
        weight[24:30] *= 1e-36
        weight[30:32] *= 1e6 if name == "v_proj" else 10.0


@pytest.mark.parametrize("name", ["bfp8", "bfp4"])
def test_keys_and_values_are_rounded_as_the_format_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference with a rounded cache is near. The plain reference is not."""
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
