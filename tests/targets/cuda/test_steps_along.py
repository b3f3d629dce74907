"""Gates in bfloat16 beside products of blocks: found on a plan, made in the same launch, with the
same logits.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.targets.cuda.test_steps_experts import CPU, LARGER, model_of
from tests.tiny import compiled, lowered, precision_of, random_tokens, step, take_seat
from tilewright.compiler.driver import weight_source
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.kernels import native, native_along
from tilewright.compiler.targets.cuda.plan import make_plan
from tilewright.compiler.targets.cuda.readers import pairs_of
from tilewright.compiler.targets.cuda.steps_along import Along
from tilewright.compiler.targets.cuda.weights import load_weights
from tilewright.compiler.targets.program.instructions import Linear, Place, Plan


def plan_of(**formats: str) -> Plan:
    model = model_of()
    return make_plan(lowered(model, target="cuda", precision=precision_of(**formats))[0])


def along_of(plan: Plan) -> Along:
    weights = load_weights(plan, weight_source(model_of()), CPU, lambda what, done, total: None)
    return Along(plan, weights, CPU)


def test_gates_are_a_pair_with_what_their_delta_rule_reads() -> None:
    plan = plan_of(weights="bfp8")
    [(each, behind)] = pairs_of(plan)
    assert (each.group, behind.group) == ("delta_in", "delta_gates")
    assert pairs_of(plan_of(weights="bf16")) == []  # gates are rows of the product


def changed(plan: Plan, which: int, **changes: Any) -> Plan:
    """A plan whose pair has another first or second."""
    pair = pairs_of(plan)[0]
    new = dataclasses.replace(pair[which], **changes)
    instructions = tuple(new if each is pair[which] else each for each in plan.instructions)
    return dataclasses.replace(plan, instructions=instructions)


def test_others_are_none() -> None:
    plan = plan_of(weights="bfp8")
    each, behind = pairs_of(plan)[0]
    other = next(one.norm for one in plan.products if one.norm not in (None, each.norm))
    x = dataclasses.replace(each.x, buffer=behind.out.buffer + 1)
    assert pairs_of(changed(plan, 1, norm=other)) == []
    assert pairs_of(changed(plan, 1, norm=None)) == []
    assert pairs_of(changed(plan, 1, eps=2 * each.eps)) == []
    assert pairs_of(changed(plan, 1, x=x)) == []
    assert pairs_of(changed(plan, 1, out=Place(each.out.buffer, 4, each.out.width))) == []
    assert pairs_of(changed(plan, 1, out=Place(each.x.buffer, 4))) == []
    assert pairs_of(changed(plan, 1, residual=True)) == []
    assert pairs_of(changed(plan, 1, bias=each.norm)) == []
    assert pairs_of(changed(plan, 0, residual=True)) == []
    assert len(pairs_of(changed(plan, 1, fqn="other"))) == 1
    at = plan.instructions.index(behind)
    between = (*plan.instructions[:at], plan.instructions[0], *plan.instructions[at:])
    assert pairs_of(dataclasses.replace(plan, instructions=between)) == []


def test_the_first_of_a_pair_makes_both_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_along, "why_not", lambda device: "")
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(
        native_along,
        "linear",
        lambda out, x, held, small, **given: launched.append({"small": small, **given}),
    )
    plan = plan_of(weights="bfp8")
    along, (each, behind) = along_of(plan), pairs_of(plan)[0]
    seen: list[Place] = []
    buffers: Any = SimpleNamespace(view=lambda place: seen.append(place) or place)
    products = [one for one in plan.instructions if isinstance(one, Linear)]
    assert not any(along.run(one, buffers, 2) for one in products) and not launched
    ran = [one for one in products if along.run(one, buffers, 1)]
    assert ran == [each, behind] and len(launched) == 1
    assert launched[0]["small"].out == behind.out and launched[0]["epilogue"] == native.STORE
    assert launched[0]["norm"][1] == each.eps and {each.out, each.x} <= set(seen)


def test_a_pair_that_no_kernel_takes_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_along, "why_not", lambda device: "")
    monkeypatch.setattr(native_along, "MOST_TILES", 0)
    plan = plan_of(weights="bfp8")
    assert not any(along_of(plan).run(each, None, 1) for each in plan.products)  # type: ignore[arg-type]


def test_without_its_kernels_all_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_along, "why_not", lambda device: "no GPU")
    plan = plan_of(weights="bfp8")
    assert not any(along_of(plan).run(each, None, 1) for each in plan.products)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
def test_logits_are_those_of_two_launches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, launched = [], []
    launch, takes = native_along.linear, native_along.takes
    monkeypatch.setattr(
        native_along, "linear", lambda *of, **given: launched.append(1) or launch(*of, **given)
    )
    for is_along in (True, False):
        monkeypatch.setattr(native_along, "takes", takes if is_along else lambda *_: False)
        launched.clear()
        precision = precision_of(kind, kv_cache="bf16")
        executable = compiled(model_of(**LARGER), "cuda", precision=precision, compute="fast")
        assert isinstance(executable, CudaExecutable)
        seat = take_seat(executable, 40)
        logits = [step(executable, [(seat, random_tokens(9), 0)]).clone()]
        logits += [step(executable, [(seat, [7 + at], at)]).clone() for at in range(9, 14)]
        executable.close()
        assert bool(launched) == is_along
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
