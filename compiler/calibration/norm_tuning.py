"""Norm tuning: rescale norm weights for predictions near the original's, with constant codes.

Gradients of the divergence (KL) run backward by segments, with the activation memory for a layer.
Legend: T tokens, C channels, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.calibration.forward import LayeredForward, LayerSegment, Weights
from tilewright.compiler.ir.info import info
from tilewright.compiler.targets.interface.base import Progress

EPOCHS = 3
STEP_TOKENS = 2048
"""Tokens in a step: the groups of both forwards."""
_RATE = 2e-3
_WARMUP = 4
_ROWS = 256
"""Logit rows in memory together."""


@dataclass(frozen=True, slots=True)
class _Teacher:
    """The original's final hidden values by group, and its head."""

    hidden: tuple[Tensor, ...]
    head: Tensor


def tune_norms(
    student: LayeredForward, original: LayeredForward, progress: Progress
) -> dict[str, Tensor]:
    """Return tuned norm weights by tensor name, in float32.

    Both forwards have the same sequences. ``student`` has the calibrated weights.
    """
    teacher = _predictions(original)
    run = _TuningRun(student)
    optimizer = torch.optim.Adam(run.gains.values(), lr=_RATE, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    steps = EPOCHS * student.num_groups
    done = 0
    for _ in range(EPOCHS):
        for index in torch.randperm(student.num_groups, generator=generator).tolist():
            optimizer.param_groups[0]["lr"] = _RATE * _share(done, steps)
            run.set_gradients(student.groups[index], teacher.hidden[index], teacher.head)
            optimizer.step()
            done += 1
            progress("tune norms", done, steps)
    return run.tuned()


def _share(step: int, steps: int) -> float:
    """Return a step's share of the rate: linear start, then a cosine down to 5 %."""
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return min(1.0, (step + 1) / _WARMUP) * (0.05 + 0.95 * cosine)


def _predictions(forward: LayeredForward) -> _Teacher:
    """Run the original."""
    head = forward.segments[-1].products[-1]
    hidden: list[Tensor] = []
    weights: Mapping[Node, Tensor] = {}
    for segment in forward.segments:
        weights = forward.load(segment)

        def watch(node: Node, arguments: tuple[Tensor, ...]) -> None:
            if node is head:
                hidden.append(arguments[0].bfloat16())

        list(forward.run(segment, weights, watch, skip=frozenset({head})))
    return _Teacher(tuple(hidden), _head_of(forward.segments[-1], weights))


def _head_of(segment: LayerSegment, weights: Mapping[Node, Tensor]) -> Tensor:
    node = segment.products[-1].args[1]
    assert isinstance(node, Node)
    return weights[node].bfloat16()


class _TuningRun:
    """The student with gains: a factor for every norm channel, by node."""

    def __init__(self, forward: LayeredForward) -> None:
        self._forward = forward
        self._head = forward.segments[-1].products[-1]
        self._skip = frozenset({self._head})
        self._weights: list[Weights] = []
        for segment in forward.segments:
            weights = forward.load(segment)
            if segment is forward.segments[-1]:
                self._head_VC = _head_of(segment, weights)
            self._weights.append(forward.cast(segment, weights, self._skip))
        self._norms = [_norms_of(segment) for segment in forward.segments]
        self.gains = {
            node: torch.ones_like(weights[node]).requires_grad_()
            for norms, weights in zip(self._norms, self._weights, strict=True)
            for node in norms
        }

    def tuned(self) -> dict[str, Tensor]:
        """Return the norm weights as the checkpoint stores them, without a segment's offset."""
        tuned = {}
        for norms, weights in zip(self._norms, self._weights, strict=True):
            for node in norms:
                recipe = info(node).recipe
                assert recipe is not None
                part = recipe.segments[0]
                values = weights[node] * self.gains[node].detach() - part.offset
                tuned[part.name] = values.cpu()
        return tuned

    def set_gradients(
        self, group: Mapping[Node, Tensor], teacher_TC: Tensor, teacher_VC: Tensor
    ) -> None:
        """Set the gains' gradients for one group of sequences."""
        starts: list[Mapping[Node, Tensor]] = [group]
        for index in range(len(self._weights) - 1):
            segment, weights = self._forward.segments[index], self._scaled(index)
            starts.append(
                self._forward.step(segment, weights, starts[-1], _ignore, skip=self._skip)
            )
        for gain in self.gains.values():
            gain.grad = None
        first = min(index for index, norms in enumerate(self._norms) if norms)
        after: dict[Node, Tensor] = {}
        for index in reversed(range(first, len(self._weights))):
            leaves = {
                n: v.detach().requires_grad_(v.is_floating_point())
                for n, v in starts[index].items()
            }
            self._backward(index, leaves, after, (teacher_TC, teacher_VC))
            after = {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}

    def _backward(
        self,
        index: int,
        leaves: Mapping[Node, Tensor],
        after: Mapping[Node, Tensor],
        teacher: tuple[Tensor, Tensor],
    ) -> None:
        """Run a segment again and its gradients backward. ``after``: gradients of its values."""
        hidden: list[Tensor] = []

        def watch(node: Node, arguments: tuple[Tensor, ...]) -> None:
            if node is self._head:
                hidden.append(arguments[0])

        segment, weights = self._forward.segments[index], self._scaled(index)
        how: Any = {"skip": self._skip, "has_gradients": True}
        values = self._forward.step(segment, weights, leaves, watch, **how)
        if hidden:
            slope_TC = _slope(hidden[0].detach(), self._head_VC, *teacher)
            hidden[0].backward(slope_TC)
            return
        ends = [node for node in after if values[node].requires_grad]
        torch.autograd.backward([values[n] for n in ends], [after[n] for n in ends])

    def _scaled(self, index: int) -> Weights:
        weights = self._weights[index]
        return {**weights, **{n: weights[n] * self.gains[n] for n in self._norms[index]}}


def _slope(hidden_TC: Tensor, head_VC: Tensor, wanted_TC: Tensor, wanted_VC: Tensor) -> Tensor:
    """Return the gradient of the mean divergence from the original, at the hidden values."""
    parts = []
    for rows, others in zip(hidden_TC.split(_ROWS), wanted_TC.split(_ROWS), strict=True):
        student_RV = (rows.bfloat16() @ head_VC.T).float().softmax(-1)
        teacher_RV = (others @ wanted_VC.T).float().softmax(-1)
        parts.append((student_RV - teacher_RV).bfloat16() @ head_VC)
    return torch.cat(parts).to(hidden_TC.dtype) / hidden_TC.shape[0]


def _norms_of(segment: LayerSegment) -> tuple[Node, ...]:
    """Return a segment's norm weights. Norms from several checkpoint tensors are left out."""
    weights: dict[Node, None] = {}
    for node in segment.nodes:
        weight = node.args[1] if node.target is ops.rms_norm.overload else None
        recipe = info(weight).recipe if isinstance(weight, Node) else None
        if isinstance(weight, Node) and recipe is not None and len(recipe.segments) == 1:
            weights[weight] = None
    return tuple(weights)


def _ignore(_: Node, __: tuple[Tensor, ...]) -> None:
    """Watch nothing."""
