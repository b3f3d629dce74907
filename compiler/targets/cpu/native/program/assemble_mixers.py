"""How experts and linear attention become what the library runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.numerics import VECTOR, storage_format
from tilewright.compiler.targets.cpu.native.program.assembly import (
    Assembly,
    arithmetics_of,
    place_of,
)
from tilewright.compiler.targets.cpu.native.program.weights import NativeTensorSpec
from tilewright.compiler.targets.program.instructions import (
    Convolve,
    DeltaRuleOp,
    ExpertLinearOp,
    ExpertSum,
    Instruction,
    TopKRouteOp,
)


def _route(assembly: Assembly, instruction: TopKRouteOp) -> None:
    assembly.num_experts, assembly.top_k = instruction.logits.width, instruction.top_k
    flags = lib.RENORMALISE * instruction.renormalise
    bias = -1 if instruction.bias is None else assembly.vector(instruction.bias)
    fields = {"flags": flags, "bias": bias, "scale": instruction.scale, **_routed(assembly)}
    assembly.append("route", None, x=place_of(instruction.logits), **fields)


def _routed(assembly: Assembly) -> dict[str, int]:
    return {"num_experts": assembly.num_experts, "top_k": assembly.top_k}


def _product(assembly: Assembly, instruction: ExpertLinearOp | ExpertSum) -> dict[str, Any]:
    assert instruction.compute is not None, f"{instruction.fqn} has no fidelity"
    arithmetics = arithmetics_of(
        storage_format(instruction.weight), instruction.compute, exact=assembly.exact
    )
    paired = isinstance(instruction, ExpertLinearOp) and instruction.swiglu
    bias = assembly.expert_bias(instruction.bias, paired=paired)
    return {
        "x": place_of(instruction.x),
        "arithmetic": arithmetics,
        "bias": bias,
        **_routed(assembly),
    }


def _experts(assembly: Assembly, instruction: ExpertLinearOp) -> None:
    weight = assembly.weight(instruction.weight, paired=instruction.swiglu)
    fields = _product(assembly, instruction) | {
        "weight": weight,
        "flags": lib.PAIRED * instruction.swiglu,
    }
    fields |= {"soft_cap": instruction.limit, "factor": instruction.alpha}
    assembly.append("experts", instruction.out, **fields)


def _expert_sum(assembly: Assembly, instruction: ExpertSum) -> None:
    fields = _product(assembly, instruction) | {"weight": assembly.weight(instruction.weight)}
    if instruction.shared is not None:
        shared, gate = instruction.shared
        fields |= {"y": place_of(shared), "gate": place_of(gate)}
    assembly.append(
        "expert_sum", instruction.out, flags=lib.RESIDUAL * instruction.residual, **fields
    )


def _convolve(assembly: Assembly, instruction: Convolve) -> None:
    num_channels, num_kept = instruction.state.shape
    state = lib.TwState(lib.STATES.index("window"), 0, num_channels, num_kept, 0, 0)
    taps = NativeTensorSpec(instruction.weight, VECTOR, num_taps=num_kept + 1)
    weight, number = assembly.tensor(taps), assembly.state(state)
    fields = {"weight": weight, "state": number, "flags": 0 if instruction.silu else lib.LINEAR}
    assembly.append("convolve", instruction.out, x=place_of(instruction.x), **fields)


def _delta_rule(assembly: Assembly, instruction: DeltaRuleOp) -> None:
    if instruction.convolve is not None:
        _convolve(assembly, instruction.convolve)
    num_heads, key_dim, value_dim = instruction.state.shape
    state = lib.TwState(lib.STATES.index("matrix"), 0, num_heads, key_dim, value_dim, 0)
    assembly.append(
        "delta_rule",
        instruction.out,
        x=place_of(instruction.qkv),
        y=place_of(instruction.a),
        z=place_of(instruction.b),
        gate=place_of(instruction.z),
        bias=assembly.vector(instruction.a_log),
        other=assembly.vector(instruction.dt_bias),
        norm=assembly.vector(instruction.norm),
        eps=instruction.eps,
        num_key_heads=instruction.num_key_heads,
        state=assembly.state(state),
    )


MIXERS: dict[type[Instruction], Callable[[Assembly, Any], None]] = {
    TopKRouteOp: _route,
    ExpertLinearOp: _experts,
    ExpertSum: _expert_sum,
    Convolve: _convolve,
    DeltaRuleOp: _delta_rule,
}
"""Assembling functions by instruction type."""
