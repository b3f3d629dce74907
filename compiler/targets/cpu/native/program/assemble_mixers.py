"""How experts and linear attention become what the library runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.numerics import VECTOR, held_kind
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


def _route(assembly: Assembly, each: TopKRouteOp) -> None:
    assembly.num_experts, assembly.top_k = each.logits.width, each.top_k
    flags = lib.RENORMALISE * each.renormalise
    assembly.append("route", None, x=place_of(each.logits), flags=flags, **_routed(assembly))


def _routed(assembly: Assembly) -> dict[str, int]:
    return {"num_experts": assembly.num_experts, "top_k": assembly.top_k}


def _product(assembly: Assembly, each: ExpertLinearOp | ExpertSum) -> dict[str, Any]:
    assert each.compute is not None, f"{each.fqn} has no fidelity"
    arithmetics = arithmetics_of(held_kind(each.weight), each.compute, exact=assembly.exact)
    return {"x": place_of(each.x), "arithmetic": arithmetics, **_routed(assembly)}


def _experts(assembly: Assembly, each: ExpertLinearOp) -> None:
    weight = assembly.weight(each.weight, paired=each.swiglu)
    fields = _product(assembly, each) | {"weight": weight, "flags": lib.PAIRED * each.swiglu}
    assembly.append("experts", each.out, **fields)


def _expert_sum(assembly: Assembly, each: ExpertSum) -> None:
    fields = _product(assembly, each) | {"weight": assembly.weight(each.weight)}
    if each.shared is not None:
        shared, gate = each.shared
        fields |= {"y": place_of(shared), "gate": place_of(gate)}
    assembly.append("expert_sum", each.out, flags=lib.RESIDUAL * each.residual, **fields)


def _convolve(assembly: Assembly, each: Convolve) -> None:
    num_channels, num_kept = each.state.shape
    state = lib.TwState(lib.STATES.index("window"), 0, num_channels, num_kept, 0, 0)
    taps = NativeTensorSpec(each.weight, VECTOR, num_taps=num_kept + 1)
    weight, number = assembly.tensor(taps), assembly.state(state)
    assembly.append("convolve", each.out, x=place_of(each.x), weight=weight, state=number)


def _delta_rule(assembly: Assembly, each: DeltaRuleOp) -> None:
    if each.convolve is not None:
        _convolve(assembly, each.convolve)
    num_heads, key_dim, value_dim = each.state.shape
    state = lib.TwState(lib.STATES.index("matrix"), 0, num_heads, key_dim, value_dim, 0)
    assembly.append(
        "delta_rule",
        each.out,
        x=place_of(each.qkv),
        y=place_of(each.a),
        z=place_of(each.b),
        gate=place_of(each.z),
        bias=assembly.vector(each.a_log),
        other=assembly.vector(each.dt_bias),
        norm=assembly.vector(each.norm),
        eps=each.eps,
        num_key_heads=each.num_key_heads,
        state=assembly.state(state),
    )


MIXERS: dict[type[Instruction], Callable[[Assembly, Any], None]] = {
    TopKRouteOp: _route,
    ExpertLinearOp: _experts,
    ExpertSum: _expert_sum,
    Convolve: _convolve,
    DeltaRuleOp: _delta_rule,
}
"""What assembles each instruction."""
