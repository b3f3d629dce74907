"""Model predictions in float arithmetic on format values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.calibration.forward import LayeredForward, product_dtype
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
_TOKENS = 4096
"""Vocabulary entries compared together: a tile of logits stays in the processor's cache."""


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


def divergences(runs: Sequence[Tensor], truth_TC: Tensor, head_VC: Tensor) -> list[Tensor]:
    """Return the KL divergence by position of runs with the same head from a truth.

    With logit differences d and the truth's probabilities p, KL = log(sum p e^d) - sum p d.
    Differences are products in the fast type, so rounding errors are relative to them.
    """
    dtype = product_dtype(head_VC.device)
    tiles = head_VC.to(dtype).split(_TOKENS)
    results: list[list[Tensor]] = [[] for _ in runs]
    for start in range(0, truth_TC.shape[0], _ROWS):
        rows_RC = truth_TC[start : start + _ROWS]
        p_RV = (rows_RC @ head_VC.T).softmax(-1).split(_TOKENS, 1)
        for run_TC, parts in zip(runs, results, strict=True):
            off_RC = (run_TC[start : start + _ROWS] - rows_RC).to(dtype)
            mean_R, grown_R = p_RV[0].new_zeros(2, rows_RC.shape[0])
            for tile, p in zip(tiles, p_RV, strict=True):
                d = (off_RC @ tile.T).float()
                mean_R += (p * d).sum(-1)
                grown_R += d.expm1_().mul_(p).sum(-1)
            parts.append((grown_R.log1p() - mean_R).clamp(min=0))
    return [torch.cat(parts) for parts in results]
