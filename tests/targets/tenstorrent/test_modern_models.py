"""Recent families, experts and Gated DeltaNet on boards against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.targets.tenstorrent.boards import board_precision, emulated, programs
from tests.tiny import (
    compiled,
    copy_slot,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.tenstorrent.emulate.arithmetic import attend, ring_sum
from tilewright.compiler.targets.tenstorrent.program.instructions import TtAttention, class_name
from tilewright.errors import CompileError, RequestError
from tilewright.models.config import DeltaShape, RopeConfig, YarnScaling
from tilewright.runtime.engine import Engine

HIDDEN = {"hidden_size": 64, "head_dim": 32}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_size": 32}
HYBRID = {
    **HIDDEN,
    "linear_layers": (True, False),
    "delta": DeltaShape(2, 4, 16, 16, 4),
    "rope": RopeConfig(theta=10000.0, num_rotated=8),
}
YARN = RopeConfig(150000.0, YarnScaling(4.0, 64, 1.1386294361119891, truncate=False))
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**HIDDEN, "model_type": "qwen3"},
    "glm4": {**HIDDEN, "model_type": "glm4", "rope": RopeConfig(theta=10000.0, num_rotated=16)},
    "qwen3_moe": {**HIDDEN, **EXPERTS, "model_type": "qwen3_moe"},
    "softmax_of_all": {**HIDDEN, **EXPERTS, "model_type": "qwen3_moe", "renormalise": False},
    "qwen3_5": {**HYBRID, "model_type": "qwen3_5"},
    "qwen3_5_moe": {**HYBRID, **EXPERTS, "shared_size": 32, "model_type": "qwen3_5_moe"},
    "qwen3_next": {
        **{**HYBRID, **EXPERTS, "experts_per_token": 8},
        **{"shared_size": 32, "model_type": "qwen3_next"},
    },
    "smollm3": {**HIDDEN, "model_type": "smollm3", "second_layers": (1,), "windows": (0, 5)},
    "granite": {
        **{**HIDDEN, "model_type": "granite", "embedding_factor": 3.0, "residual_factor": 0.25},
        **{"score_factor": 0.125, "logit_divisor": 2.0},
    },
    "ministral3": {**HIDDEN, "model_type": "ministral3", "rope": YARN},
    "muse_glimmer": {
        **{**HIDDEN, "model_type": "muse_glimmer", "second_layers": (1,), "windows": (0, 3)},
        **{"query_factor": 1.7, "logit_cap": 2.0, "logit_factor": 0.7, "post_norm_eps": 1e-3},
    },
    "gemma3": {
        **HIDDEN,
        **{"model_type": "gemma3_text", "windows": (4, 0), "logit_cap": 5.0},
        "query_scale": 32.0,
    },
    "gpt_oss": {
        **HIDDEN,
        **EXPERTS,
        **{"model_type": "gpt_oss", "windows": (4, 0), "swiglu_limit": 0.5},
        **{"attention_bias": True, "output_bias": True},
        "rope": YARN,
    },
}
PLAIN = board_precision("bf16", "hifi4", activation="bf16", kv_cache="bf16", router="bf16")
TOKENS = random_tokens(11)
CHUNKS = [6, 3, 1]


def model_of(name: str) -> SimpleNamespace:
    return tiny_model(std=0.2, **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_emulation_is_near_the_reference(name: str) -> None:
    """In bfloat16 on one chip and two chips, in chunks and steps."""
    model = model_of(name)
    expected = prefill(compiled(model, precision=PLAIN), TOKENS)
    for board in ("p150", "p300"):
        found = prefill(emulated(model, precision=PLAIN, name=board), TOKENS, CHUNKS)
        assert (found - expected).std() < 0.05 * expected.std(), board


def test_prompts_of_gated_deltanet_are_summed_in_float32() -> None:
    """The product is float32, and its sum is cast to bfloat16. Steps are summed in bfloat16."""
    formats = {}
    for program in programs(model_of("qwen3_5"), Mesh(2), precision=board_precision(), name="p300"):
        layer = [op for op in program.instructions if op.fqn.endswith("linear_attn.out_proj")]
        formats[program.phase] = [(class_name(op), op.out.format) for op in layer]
    sums = [("ReduceScatter", "bf16"), ("AllGather", "bf16")]
    assert formats["prefill"] == [("Matmul", "fp32"), *sums]
    assert formats["decode"] == [("Matmul", "bf16"), *sums]
    small = torch.full((1, 64), 2.0**-10)
    parts = [torch.ones(1, 64), small, small]
    assert torch.equal(ring_sum(parts, "fp32"), sum(parts)) and ring_sum(parts, "bf16").max() == 1


@pytest.mark.parametrize(
    ("name", "board"),
    [("qwen3", "n300"), ("qwen3_5_moe", "p150"), ("gemma3", "p150"), ("gpt_oss", "p150")],
)
def test_text_in_decode_chunks_has_the_bits_of_single_steps(name: str, board: str) -> None:
    """Windows, sinks, experts, several chips and per-sequence state included."""
    engine = Engine(emulated(model_of(name), name=board))
    prompt, text = torch.tensor(TOKENS[:4]), torch.tensor(TOKENS[4:])
    engine.prefill([0, 1], [prompt, prompt])
    together = torch.cat(list(engine.decode_text(0, text)))
    alone = torch.cat([engine.decode([1], token) for token in text.split(1)])
    assert torch.equal(together, alone)
    last = torch.tensor([TOKENS[0]])
    assert torch.equal(engine.decode([0], last), engine.decode([1], last)), "state after the text"
    with pytest.raises(RequestError, match="request 0 is at the end of its context"):
        next(engine.decode_text(0, torch.tensor(TOKENS * 6)))


def test_experts_over_chips_are_one_chip_bit_for_bit_without_sums_over_chips() -> None:
    """Two experts of a token on one chip, or on two: sums over chips round as sums on a chip."""
    model = model_of("qwen3_moe")
    first, *others = (
        prefill(emulated(model, mesh, precision=PLAIN, name="p150"), TOKENS, [10])
        for mesh in (Mesh(), Mesh(2), Mesh(4))
    )
    for other in others:
        assert (other - first).std() < 0.03 * first.std()


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("qwen3_moe", Mesh(8, 4), "8 experts over 8x4; allowed on Tenstorrent boards: a mesh of"),
        ("qwen3_5", Mesh(4), "2 heads of the delta rule over 1x4; allowed"),
    ],
)
def test_a_mesh_that_cannot_split_a_model_is_refused(name: str, mesh: Mesh, message: str) -> None:
    model = tiny_model(**{**MODELS[name], "num_heads": 8})
    with pytest.raises(CompileError, match=message):
        programs(model, mesh, precision=PLAIN, name="p150")


def test_state_continues_in_a_copy() -> None:
    executable = emulated(model_of("qwen3_5"), precision=PLAIN, name="p300")
    assert executable.capabilities.has_sequence_state
    first = take_slot(executable)
    step(executable, [(first, TOKENS[:6], 0)])
    copy = copy_slot(executable, first, 6)
    found = [step(executable, [(slot, TOKENS[6:7], 6)]) for slot in (first, copy)]
    assert torch.equal(*found)


@pytest.mark.parametrize("accurate", [False, True])
def test_sinks_take_part_in_the_softmax_and_add_no_value(accurate: bool) -> None:
    """Against a softmax in float32 with a further column, over several chunks and a window."""
    _, decode = programs(tiny_model(**MODELS["qwen3"]), precision=PLAIN, name="p150")
    attention = next(each for each in decode.instructions if isinstance(each, TtAttention))
    attention = replace(attention, k_chunk=32, window=50)
    generator = torch.Generator().manual_seed(3)
    q, keys, values = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((5, 4, 32), (70, 2, 32), (70, 2, 32))
    )
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0]).bfloat16()
    how = {"sign_error": False, "accurate": accurate}
    found = attend(q, keys, values, 65, attention, **how, sinks=sinks)
    wide = [each.float().repeat_interleave(2, 1) for each in (keys, values)]
    scores = torch.einsum("thd,lhd->htl", q.float(), wide[0]) * attention.scale
    at, positions = torch.arange(65, 70)[:, None], torch.arange(70)
    scores = scores.masked_fill((positions > at) | (positions <= at - 50), -torch.inf)
    column = sinks.float().view(4, 1, 1).expand(4, 5, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("htl,lhd->thd", weights, wide[1])
    assert (found.float() - expected).abs().max() < (0.005 if accurate else 0.03)
    without = attend(q, keys, values, 65, attention, **how)
    assert (without.float() - expected).abs().max() > 0.1
