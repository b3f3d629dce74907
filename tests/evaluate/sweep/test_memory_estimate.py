"""Bytes by group before anything is compiled: sums by hand, and published sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import tiny_model
from tilewright.compiler.driver import compile_model, resolve_precision
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.table import get_target
from tilewright.evaluate.measure.roofline import weight_bytes
from tilewright.evaluate.sweep.memory_estimate import MemoryEstimate, estimate_memory, lower_outline
from tilewright.evaluate.sweep.model import experts_share, step_bytes, swept_model
from tilewright.models import load_model


def plan_of(
    shape: str, precision: str, *, target: str = "reference", batch: int = 1, context: int = 100
) -> MemoryEstimate:
    model = load_model(f"shape:{shape}")
    return estimate_memory(
        model,
        resolve_precision(model, load_precision(precision)),
        get_target(target),
        batch=batch,
        context=context,
        compute="fast",
    )


def test_every_weight_and_all_state_is_in_it() -> None:
    model = load_model("shape:tiny-hybrid")
    plan = plan_of("tiny-hybrid", "bf16", batch=3)
    by_group = {share.group: share for share in plan.shares}
    weights = sum(weight.numel() for weight in model.module.parameters())
    assert plan.total.num_weights == weights
    matrix = 4 * 8 * 32 * 64
    assert by_group["experts_ff1_3"].num_weights == 2 * matrix
    assert by_group["experts_ff2"].num_weights == by_group["experts_ff2"].stored / 4 == matrix
    assert plan.position_bytes == 2 * 2 * 64 * 4
    assert plan.memory_bytes == 3 * (128 * 3 + 4 * 16 * 16) * 4
    assert by_group["kv_cache"].stored == 3 * 100 * plan.position_bytes
    assert by_group["memory"].stored == 3 * plan.memory_bytes
    assert by_group["memory"].moved == 2 * by_group["memory"].stored, "read and written again"
    assert by_group["embedding"].moved == 3 * 64 * 4
    read = 1 - (1 - 2 / 8) ** 3
    assert experts_share(model, 3) == read
    assert by_group["experts_ff2"].moved == pytest.approx(read * by_group["experts_ff2"].stored)
    assert by_group["shared_ff2"].moved == by_group["shared_ff2"].stored


@pytest.mark.parametrize(("shape", "target"), [("tiny-moe", "reference"), ("tiny", "cpu")])
def test_what_is_compiled_takes_what_was_told(shape: str, target: str) -> None:
    """To the byte, but for what the reference has besides: the frequencies of rotary embedding."""
    options = CompileOptions(max_batch=2, max_context=64)
    precision = load_precision("precision_cfg = {ff2: bfp8}, layer_cfg = {1: {ff2: bf16}}")
    model: Any = load_model(f"shape:{shape}")
    compiled = compile_model(model, precision, target=target, options=options)
    held, state = compiled.executable.memory().weights, compiled.executable.state_bytes(64, 2)
    read = weight_bytes(compiled.graph(), num_tokens=2, target=get_target(target), compute="fast")
    compiled.executable.close()
    resolved = resolve_precision(model, precision)
    plan = estimate_memory(model, resolved, get_target(target), batch=2, context=64, compute="fast")
    shares = {share.group: share for share in plan.shares}
    cache = shares.pop("kv_cache").stored
    constants = 4 * model.config.head_dim // 2 if target == "reference" else 0
    assert held == sum(share.stored for share in shares.values()) + constants
    assert cache == (state if target == "reference" else 2 * state), "the cpu's is of 64 in all"
    for group, share in shares.items():
        if group != "other":  # a step reads constants as well
            assert read[group] == pytest.approx(share.moved)


def test_layers_that_differ_are_lowered_each_and_the_others_once() -> None:
    model: Any = load_model("shape:tiny-hybrid")
    precision = resolve_precision(model, load_precision("bf16"))
    outline = lower_outline(model, precision, get_target("cpu"))
    assert sum(outline.counts.values()) == model.config.num_layers > len(outline.counts)
    assert len(model.module.model.layers) == model.config.num_layers, "the model is as it was"
    rule = "precision_cfg = {}, layer_cfg = {1: {experts_ff2: fp32}}"
    changed = resolve_precision(model, load_precision(rule))
    assert lower_outline(model, changed, get_target("cpu")).counts[1] == 1


def test_a_layer_with_a_window_is_told_as_it_is_held() -> None:
    """The native cpu target gives back what lies 1,024 positions and more before a window."""
    model: Any = tiny_model(model_type="gemma3_text", windows=(64, 0), max_positions=8192)
    precision = resolve_precision(model, load_precision("bf16"))
    told = {}
    for target in ("cpu-native", "cuda"):
        chosen = get_target(target)
        plan = estimate_memory(model, precision, chosen, batch=1, context=6400, compute="fast")
        told[target] = {share.group: share for share in plan.shares}["kv_cache"]
        layer = plan.position_bytes / 2
        assert told[target].moved == layer * (64 + 6400)
        held = 64 + 1024 if target == "cpu-native" else 6400
        assert told[target].stored == layer * (held + 6400)


def test_a_large_model_is_told_at_once() -> None:
    plan = plan_of("llama-3.1-70b", "bf16", target="cuda", context=8)
    assert plan.total.num_weights == pytest.approx(70.55e9, rel=1e-3)
    assert plan.position_bytes == 80 * 2 * 8 * 128 * 2


HALF = "fidelity_cfg = {li_ff1_3: hifi4, li_ff2: lofi}"
OTHER_HALF = "fidelity_cfg = {li_ff1_3: lofi, li_ff2: hifi4}"
LOW = "fidelity_cfg = {li_ff1_3: lofi, li_ff2: lofi}"
BLOCKS = {
    "alike": ("experts_ff1_3: bfp8, experts_ff2: bfp8", LOW, {"bfp8 blocks"}),
    "wider": (
        "experts_ff1_3: bfp4, experts_ff2: bfp8",
        LOW,
        {"bfp8 blocks", "8-bit blocks of 16"},
    ),
    "shorter": (
        "experts_ff1_3: bfp4, experts_ff2: q40",
        LOW,
        {"bfp4 blocks", "4-bit blocks of 16"},
    ),
    "both": ("experts_ff1_3: bfp4, experts_ff2: q80", LOW, {"8-bit blocks of 16"}),
    "into in float": ("experts_ff1_3: bf16, experts_ff2: bfp4", HALF, {"float32"}),
    "out in float": ("experts_ff1_3: bfp4, experts_ff2: bf16", OTHER_HALF, {"float32"}),
    "into in more phases": ("experts_ff1_3: bfp4, experts_ff2: bfp4", HALF, {"float32"}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_experts_is_told_as_it_is_held(name: str) -> None:
    """As one on the cpu: in the wider codes, the shorter blocks, or all in float32."""
    formats, fidelities, kinds = BLOCKS[name]
    precision = load_precision(f"precision_cfg = {{{formats}}}, {fidelities}")
    options = CompileOptions(max_batch=1, max_context=64)
    model: Any = load_model("shape:tiny-moe")
    compiled = compile_model(model, precision, target="cpu", options=options)
    held = compiled.executable.memory().weights
    read = weight_bytes(compiled.graph(), num_tokens=1000, target=get_target("cpu"), compute="fast")
    compiled.executable.close()
    resolved = resolve_precision(model, precision)
    plan = estimate_memory(model, resolved, get_target("cpu"), batch=1, context=64, compute="fast")
    shares = {share.group: share for share in plan.shares}
    groups = ("experts_ff1_3", "experts_ff2")
    assert {kind for group in groups for kind in shares[group].kinds} == kinds
    told = sum(share.stored for group, share in shares.items() if group != "kv_cache")
    assert held == told
    for group in groups:
        assert read[group] == pytest.approx(shares[group].stored), "all experts are chosen"
    swept = swept_model(model, "shape:tiny-moe").stored_bytes(resolved, "cpu")
    assert sum(swept.values()) == told - shares["other"].stored


def test_what_holds_nothing_is_told_so() -> None:
    plan = plan_of("tiny-hybrid", "bf16", target="null")
    assert plan.position_bytes == plan.memory_bytes == 0
    assert plan.total.stored == 0 and plan.total.num_weights > 0


def test_a_decode_step_of_a_published_mixture() -> None:
    """At bf16: 3.88 GB that every token needs, and 6.29 MB of each expert that is chosen."""
    experts = 256 * (1 - (1 - 8 / 256) ** 64)
    plan = plan_of("qwen3.5-35b-a3b", "bf16", target="cuda", batch=64)
    weights = sum(s.moved for s in plan.shares if s.group not in ("kv_cache", "memory"))
    assert weights == pytest.approx(3.88e9 + 40 * experts * 6.29e6, rel=0.01)
    assert plan.position_bytes == 20_480
    assert plan.memory_bytes == 30 * (32 * 128 * 128 + 8192 * 3) * 4


def test_layers_of_their_own_format_are_listed_and_counted() -> None:
    heading = "precision_cfg = {experts_ff1_3: bf16}, layer_cfg = {1: {experts_ff1_3: fp32}}"
    model: Any = load_model("shape:tiny-moe")
    resolved = resolve_precision(model, load_precision(heading))
    plan = estimate_memory(
        model, resolved, get_target("reference"), batch=1, context=8, compute="fast"
    )
    (share,) = [each for each in plan.shares if each.group == "experts_ff1_3"]
    assert share.formats == ("bf16", "fp32")


def test_a_sweep_reads_the_experts_of_one_token() -> None:
    loaded: Any = load_model("shape:tiny-moe")
    model = swept_model(loaded, "shape:tiny-moe")
    assert {"experts_ff1_3", "experts_ff2"} <= set(model.groups())
    held = model.stored_bytes(model.resolve(load_precision("bf16")), "reference")
    whole = sum(step_bytes(held).values())
    read = sum(step_bytes(held, experts_share(loaded, 1)).values())
    experts = sum(size for (group, _, _), size in held.items() if group.startswith("experts"))
    assert whole - read == pytest.approx(experts * 6 / 8)
    assert experts_share(load_model("shape:tiny"), 4) == 1.0
