"""Accuracy loss by layer and operation, against fp32, each restored in turn.

Float arithmetic on format values, through the whole depth. A restored
run has a single operation's weights in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.calibration.forward import LayeredForward, LayerSegment
from tilewright.compiler.driver import (
    CompilableModel,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.recipe import load_values
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.interface.base import Progress
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.pipeline import MATCH, PRECISION
from tilewright.errors import ConfigError

ALL = "all"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """An operation in a layer, or a setting for the whole model.

    Attributes:
        place: Layer, ``head``, or ``all`` for the whole model.
        operation: Tensor group, or the setting's name.
        format: Format before restoring; for a setting, the restored value.
        own_error: Relative output error for fp32 inputs. None for settings.
        error: Relative output error in the whole run. None for settings.
        correlation: Correlation with the fp32 outputs. None for settings.
        kl_gain: Decrease in KL divergence when restored, in nats. None: not restored.
        flips: Change in top-1 matches when restored.
        largest: Largest error of an output, in standard deviations of the fp32 outputs. For a
            setting, that of a log probability on the target when restored.
    """

    place: str
    operation: str
    format: str
    own_error: float | None = None
    error: float | None = None
    correlation: float | None = None
    kl_gain: float | None = None
    flips: int | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class LossTrace:
    """Trace rows, worst first, and the whole run's accuracy."""

    rows: tuple[TraceRow, ...]
    top1: float
    kl: float
    num_positions: int


_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def trace(
    model: CompilableModel,
    precision: PrecisionConfig,
    tokens_ST: Tensor,
    *,
    original: CompilableModel | None = None,
    restores: bool = True,
    progress: Progress = silent,
) -> LossTrace:
    """Trace a model's loss against ``original`` (None: its own fp32 values).

    Raises:
        ConfigError: for an original with another shape.
    """
    original = original or model
    for name in ("num_layers", "hidden_size", "vocab_size"):
        own, wanted = getattr(original.config, name), getattr(model.config, name)
        if own != wanted:
            raise ConfigError(
                f"{original.name}: {name} {own} of the reference; allowed by {model.name}: {wanted}"
            )
    graph, _ = lower_model(model, resolve_precision(model, precision), (MATCH, PRECISION), silent)
    longest, cpu = model.config.max_positions, torch.device("cpu")
    of_model, of_original = weight_source(model, longest), weight_source(original, longest)
    is_tied = original.config.tie_embeddings

    def get_exact(name: str) -> Tensor:
        return of_original(_EMBEDDING if is_tied and name == _HEAD else name)

    how: dict[str, Any] = {"weight_of": load_values, "exact": True}
    lossy = LayeredForward(graph, of_model, tokens_ST, cpu, **how)
    exact = LayeredForward(graph, get_exact, tokens_ST, cpu, exact=True)
    run = _TraceRun(exact, lossy, restores=restores)
    for index, segment in enumerate(lossy.segments):
        progress("trace", index, len(lossy.segments))
        run.advance(segment)
    return run.finish(lambda done, total: progress("restore", done, total))


_Groups = Sequence[Mapping[Node, Tensor]]
"""Values by node, for each group of sequences."""


class _TraceRun:
    """Runs in fp32, in the formats, and with a restored operation, layer after layer."""

    def __init__(self, exact: LayeredForward, lossy: LayeredForward, *, restores: bool) -> None:
        self._exact, self._lossy, self._restores = exact, lossy, restores
        self._truth: _Groups = exact.groups
        self._plain: _Groups = lossy.groups
        self._restored: dict[int, _Groups] = {}  # by row
        self._rows: list[TraceRow] = []
        self._head = lossy.segments[-1].products[-1]
        self._stride = -(-lossy.num_tokens // _SCORED)
        self._inputs: dict[int, Tensor] = {}  # of the head, by restored row

    def advance(self, segment: LayerSegment) -> None:
        """Run a segment in all streams, and start a stream for each operation."""
        exact, lossy = self._exact.load(segment), self._lossy.load(segment)
        dense = {node for node in segment.products if node.target is ops.linear.overload}
        before = self._plain
        self._truth, wanted = self._step(self._exact, segment, exact, self._truth, dense)
        self._plain, found = self._step(self._lossy, segment, lossy, before, dense)
        for row, groups in self._restored.items():
            self._restored[row], inputs = self._step(
                self._lossy, segment, lossy, groups, {self._head}
            )
            if self._head in inputs:
                self._inputs[row] = inputs[self._head]
        operations: dict[tuple[str, str], list[Node]] = {}
        for node in segment.products:
            facts = info(node)
            place = "head" if facts.layer is None else f"layer {facts.layer}"
            operations.setdefault((place, facts.tensor_group or node.name), []).append(node)
        for (place, group), nodes in operations.items():
            measured = _measure(place, group, nodes, exact, lossy, wanted, found)
            if self._restores and self._head not in nodes and measured.own_error != 0.0:
                weights = {**lossy, **{n: exact[n] for n in _weights_of(nodes)}}
                groups, _ = self._step(self._lossy, segment, weights, before, set())
                self._restored[len(self._rows)] = groups
            self._rows.append(measured)
        if self._head in segment.nodes:
            (weight,) = _weights_of([self._head])
            self._head_weights = exact[weight], lossy[weight]
            self._truth_input, self._plain_input = wanted[self._head], found[self._head]

    def finish(self, report: Callable[[int, int], None]) -> LossTrace:
        """Compare all streams with fp32."""
        exact_VC, lossy_VC = self._head_weights
        wanted = self._truth_input @ exact_VC.T
        truth, guesses = wanted.log_softmax(-1), wanted.argmax(-1)

        def score(hidden_TC: Tensor, head_VC: Tensor) -> tuple[float, int]:
            found = hidden_TC @ head_VC.T
            right = int((found.argmax(-1) == guesses).sum())
            kl = (truth.exp() * (truth - found.log_softmax(-1))).sum(-1)
            return float(kl.mean()), right

        kl, right = score(self._plain_input, lossy_VC)
        rows = list(self._rows)
        for done, (row, inputs) in enumerate(self._inputs.items()):
            report(done, len(self._inputs))
            rows[row] = _with_gain(rows[row], kl, right, *score(inputs, lossy_VC))
        for index, each in enumerate(rows):
            if each.place == "head" and self._restores:
                rows[index] = _with_gain(each, kl, right, *score(self._plain_input, exact_VC))
        found = sorted(rows, key=_loss, reverse=True)
        return LossTrace(tuple(found), right / guesses.numel(), kl, guesses.numel())

    def _step(
        self,
        forward: LayeredForward,
        segment: LayerSegment,
        weights: Mapping[Node, Tensor],
        groups: _Groups,
        watched: set[Node],
    ) -> tuple[_Groups, dict[Node, Tensor]]:
        """Run a segment without the head. Return the values, and the inputs of watched products.

        Of the head's inputs, only the rows for scores remain.
        """
        inputs: dict[Node, list[Tensor]] = {}

        def watch(node: Node, arguments: tuple[Any, ...]) -> None:
            if node in watched:
                inputs.setdefault(node, []).append(arguments[0])

        skip = frozenset({self._head})
        ended = [forward.step(segment, weights, group, watch, skip=skip) for group in groups]
        joined = {node: torch.cat(parts) for node, parts in inputs.items()}
        if self._head in joined:
            joined[self._head] = joined[self._head][:: self._stride].clone()
        return ended, joined


def _measure(
    place: str,
    group: str,
    nodes: list[Node],
    exact: Mapping[Node, Tensor],
    lossy: Mapping[Node, Tensor],
    wanted: Mapping[Node, Tensor],
    found: Mapping[Node, Tensor],
) -> TraceRow:
    """Return an operation's output errors. Experts have none."""
    recipe = info(next(iter(_weights_of(nodes)))).recipe
    assert recipe is not None
    row = TraceRow(place, group, str(recipe.format))
    dense = [node for node in nodes if node in wanted]
    if not dense:
        return row
    truth, own, whole = [], [], []
    for node in dense:
        weight = node.args[1]
        assert isinstance(weight, Node)
        x_TC, y_TC = wanted[node][:_MEASURED], found[node][:_MEASURED]
        truth.append((x_TC @ exact[weight].T).flatten())
        own.append((x_TC @ lossy[weight].T).flatten())
        whole.append((y_TC @ lossy[weight].T).flatten())
    reference, local, total = torch.cat(truth), torch.cat(own), torch.cat(whole)
    scale = float(reference.norm()) or 1.0
    return TraceRow(
        place,
        group,
        row.format,
        own_error=float((local - reference).norm()) / scale,
        error=float((total - reference).norm()) / scale,
        correlation=float(torch.corrcoef(torch.stack([total, reference]))[0, 1]),
        largest=largest_error(total, reference),
    )


def largest_error(values: Tensor, reference: Tensor) -> float:
    """Return the largest error in standard deviations of the reference."""
    return float((values - reference).abs().max()) / (float(reference.std()) or 1.0)


_MEASURED = 64
"""Output rows for error measurement."""

_SCORED = 512
"""Maximum number of positions with scores, at equal distances. All positions run."""


def _weights_of(nodes: Iterable[Node]) -> list[Node]:
    return [weight for node in nodes if isinstance(weight := node.args[1], Node)]


def _with_gain(row: TraceRow, kl: float, right: int, own_kl: float, own_right: int) -> TraceRow:
    return replace(row, kl_gain=kl - own_kl, flips=own_right - right)


def _loss(row: TraceRow) -> tuple[float, float]:
    return (row.kl_gain if row.kl_gain is not None else -1.0, row.own_error or 0.0)
