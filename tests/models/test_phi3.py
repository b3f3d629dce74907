"""Phi-3: fused tensors, LongRoPE and partial rotation, on every target and from both containers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests import architecture_checks as checks
from tests.tiny import compiled, precision_of, prefill, random_tokens, tiny_model
from tests.twins import assert_eager_equals_twin, twin_of
from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.program import compile_cached
from tilewright.compiler.driver import compile_model, trace_model
from tilewright.compiler.ir.info import WEIGHT, info
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.spelling.rope import longrope_attention_factor
from tilewright.models.config import LongRopeScaling, RopeConfig
from tilewright.models.sources import stored_shapes


def longrope(num_pairs: int, original: int = 64, **changes: Any) -> RopeConfig:
    """Short factors near 1, long ones that tell; the context is 256 positions."""
    scaling = LongRopeScaling(
        short_factors=tuple(1.0 + 0.02 * index for index in range(num_pairs)),
        long_factors=tuple(1.5 + index for index in range(num_pairs)),
        original_max_positions=original,
        attention_factor=longrope_attention_factor(256 / original, original),
    )
    return RopeConfig(theta=10000.0, scaling=scaling, **changes)


PARTIAL: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "short": {"rope": longrope(8)},
    "long": {"rope": longrope(8, original=16), "tie_embeddings": False},
    "window": {"rope": longrope(8), "windows": (5, 5), "num_kv_heads": 4},
    "partial": {"rope": RopeConfig(theta=10000.0, num_rotated=16), **PARTIAL},
    "partial_long": {"rope": longrope(8, original=16, num_rotated=16), **PARTIAL},
}


ON_CUDA: dict[str, Any] = {"rope": longrope(8), "windows": (5,), "hidden_size": 32}
"""For tests/targets/cuda."""


def make(shape: str = "short") -> SimpleNamespace:
    return tiny_model(std=0.2, model_type="phi3", **{"hidden_size": 64, **SHAPES[shape]})


@pytest.mark.parametrize("shape", ["window", "partial"])
def test_eager_logits_and_names_are_transformers(shape: str) -> None:
    model = make(shape)
    if shape == "window":  # eager constants are those of the whole context
        model = tiny_model(
            std=0.2, **(dataclasses.asdict(model.config) | {"rope": RopeConfig(1e4)})
        )
    assert_eager_equals_twin(model)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gguf_with_llama_cpps_names(shape: str, tmp_path: Path) -> None:
    config = make(shape).config

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_count(2 * config.rope.num_pairs(config.head_dim))
        writer.add_sliding_window(config.window(0))
        if isinstance(scaling := config.rope.scaling, LongRopeScaling):
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_positions)
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)
            for name, factors in (
                ("short", scaling.short_factors),
                ("long", scaling.long_factors),
            ):
                writer.add_tensor(f"rope_factors_{name}.weight", torch.tensor(factors).numpy())

    model = make(shape)
    rounded = _in_float32(config.rope)
    model.config = dataclasses.replace(config, rope=rounded)
    model.module.config = model.config
    arch = gguf.MODEL_ARCH.PHI3
    checks.check_gguf(model, tmp_path / "tiny.gguf", architecture=arch, extra=extra)


def _in_float32(rope: RopeConfig) -> RopeConfig:
    """As a GGUF file holds the numbers: tensors exactly, a key in its shortest decimal form."""
    scaling = rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return rope
    rounded = dataclasses.replace(
        scaling,
        short_factors=tuple(torch.tensor(scaling.short_factors).tolist()),
        long_factors=tuple(torch.tensor(scaling.long_factors).tolist()),
        attention_factor=float(str(np.float32(scaling.attention_factor))),
    )
    return dataclasses.replace(rope, scaling=rounded)


def test_weights_are_rows_of_the_fused_tensors() -> None:
    model = make()
    facts = [info(node) for node in trace_model(model).graph.nodes if info(node).role == WEIGHT]
    found = {each.fqn: each.recipe for each in facts if each.layer == 1 and each.recipe is not None}
    path = "model.layers.1"
    expected = {
        "self_attn.q_proj": ("self_attn.qkv_proj", (0, 64), "q"),
        "self_attn.k_proj": ("self_attn.qkv_proj", (64, 96), "k"),
        "self_attn.v_proj": ("self_attn.qkv_proj", (96, 128), "v"),
        "mlp.gate_proj": ("mlp.gate_up_proj", (0, 48), "gate"),
        "mlp.up_proj": ("mlp.gate_up_proj", (48, 96), "up"),
    }
    for name, (tensor, rows, part) in expected.items():
        (segment,) = found[f"{path}.{name}.weight"].segments
        assert (segment.name, segment.rows) == (f"{path}.{tensor}.weight", rows)
        assert (segment.part, segment.num_rows) == (part, rows[1] - rows[0])


def test_a_fused_tensor_is_read_once() -> None:
    model = make()
    compiled(model)
    reads = model.checkpoint.reads
    assert {name: reads.count(name) for name in reads if "qkv" in name or "gate_up" in name} == {
        f"model.layers.{layer}.{name}.weight": 1
        for layer in (0, 1)
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    }


def test_what_is_wrong_with_a_fused_tensor_is_said_of_it(tmp_path: Path) -> None:
    model = make()
    name = "model.layers.1.self_attn.qkv_proj.weight"
    model.checkpoint.tensors[name][70, 3] = float("nan")
    with pytest.raises(CheckpointError, match=rf"'{name}' holds NaN or inf"):
        compiled(model)
    twin_of(model.config, model.checkpoint.tensors).save_pretrained(tmp_path)
    wider = stored_shapes(make("window").module)  # as many heads of keys as of queries
    with pytest.raises(CheckpointError) as caught:
        check_tensors(open_checkpoint(tmp_path), wider)
    message = str(caught.value)
    assert "qkv_proj.weight has shape [128, 64]; allowed: [192, 64], by" in message


def test_the_context_of_the_executable_decides_over_the_factors() -> None:
    """Within the original length by the short ones, beyond it by the long ones, whatever the
    length of the sequence; transformers changes over when a sequence passes the original length.
    """
    model = make("long")
    tokens = random_tokens(12)
    theirs = checks.their_logits(model, tokens)
    short, long = (prefill(compiled(model, max_context=each), tokens) for each in (16, 17))
    checks.assert_near(short, theirs)
    assert (long - theirs).abs().max() > 0.1


def test_a_cached_program_serves_its_kind_of_context(tmp_path: Path) -> None:
    model = make("long")
    folder = tmp_path / "tiny"
    twin_of(model.config, model.checkpoint.tensors).save_pretrained(folder)
    model.checkpoint = open_checkpoint(folder)
    cache, tokens = ProgramCache(tmp_path / "cache", 10**9), random_tokens(12)
    for context in (16, 17, 12):
        options = CompileOptions(max_context=context, compute="exact", num_threads=1)
        found = compile_cached(model, precision_of(), cache, target="cpu", options=options)
        fresh = compile_model(model, precision_of(), target="cpu", options=options)
        checks.assert_near(prefill(found.executable, tokens), prefill(fresh.executable, tokens))
    assert len(list((tmp_path / "cache" / "programs").glob("*/manifest.json"))) == 2
