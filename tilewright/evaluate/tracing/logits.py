"""Model predictions in float arithmetic on format values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.calibration.forward import LayeredForward
from tilewright.compiler.driver import (
    CompilableModel,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.ir.recipe import load_values
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.pipeline import MATCH, PRECISION

_ROWS = 256
"""Logit rows compared together."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A model's final hidden values and head, and its agreement with another model.

    ``right``: whether the top-1 tokens agree. ``kl``: divergence, in nats.
    """

    hidden: Tensor
    head: Tensor
    right: Tensor
    kl: Tensor


def observe(
    model: CompilableModel,
    precision: str,
    tokens_ST: Tensor,
    *,
    against: Observed | None = None,
) -> Observed:
    """Run a model with weights in a configuration's formats; compare its guesses.

    Raises:
        CompileError: if configuration and model do not fit.
    """
    resolved = resolve_precision(model, load_precision(precision))
    graph_module, _ = lower_model(model, resolved, (MATCH, PRECISION), silent)
    source = weight_source(model, model.config.max_positions)
    forward = LayeredForward(
        graph_module, source, tokens_ST, torch.device("cpu"), weight_of=load_values, exact=True
    )
    head = forward.segments[-1].products[-1]
    hidden: list[Tensor] = []
    weights = {}
    for segment in forward.segments:
        weights = forward.load(segment)
        for _ in forward.run(
            segment,
            weights,
            lambda node, arguments: hidden.append(arguments[0]) if node is head else None,
            skip=frozenset({head}),
        ):
            pass
    head_VC = weights[head.args[1]]  # type: ignore[index]
    return compare(torch.cat(hidden), head_VC, against)


def compare(hidden_TC: Tensor, head_VC: Tensor, against: Observed | None) -> Observed:
    """Compare two models' predictions."""
    if against is None:
        none = torch.empty(0)
        return Observed(hidden_TC, head_VC, none, none)
    right, kl = [], []
    for rows, others in zip(hidden_TC.split(_ROWS), against.hidden.split(_ROWS), strict=True):
        found, wanted = rows @ head_VC.T, others @ against.head.T
        right.append(found.argmax(-1) == wanted.argmax(-1))
        wanted, found = wanted.log_softmax(-1), found.log_softmax(-1)
        kl.append((wanted.exp() * (wanted - found)).sum(-1).clamp(min=0))
    return Observed(hidden_TC, head_VC, torch.cat(right), torch.cat(kl))
