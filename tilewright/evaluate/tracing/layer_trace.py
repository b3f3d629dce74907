"""Accuracy loss by layer and operation, against fp32, each restored in turn.

Float arithmetic on format values, through the whole depth. A restored
run has a single operation's weights in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


@dataclass(slots=True)
class _Stream:
    """A run's values. ``row``: its restored row's index. None: the plain run."""

    values: dict[Node, Tensor]
    row: int | None = None


class _TracedPair:
    """The same graph with exact weights and with weights in formats, run in step."""

    def __init__(
        self,
        model: CompilableModel,
        original: CompilableModel,
        precision: PrecisionConfig,
        tokens_ST: Tensor,
    ) -> None:
        self.graph, _ = lower_model(
            model, resolve_precision(model, precision), (MATCH, PRECISION), silent
        )
        longest = model.config.max_positions
        device = torch.device("cpu")
        self.lossy = LayeredForward(
            self.graph,
            weight_source(model, longest),
            tokens_ST,
            device,
            weight_of=load_values,
            exact=True,
        )
        source = weight_source(original, longest)
        tied = original.config.tie_embeddings
        self.exact = LayeredForward(
            self.graph,
            lambda name: source(_EMBEDDING if tied and name == _HEAD else name),
            tokens_ST,
            device,
            exact=True,
        )


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
    pair = _TracedPair(model, original, precision, tokens_ST)
    run = _TraceRun(pair, restores=restores)
    segments = pair.lossy.segments
    for index, segment in enumerate(segments):
        progress("trace", index, len(segments))
        run.advance(segment)
    return run.finish(lambda done, total: progress("restore", done, total))


class _TraceRun:
    """Runs in fp32, in the formats, and with a restored operation, layer after layer."""

    def __init__(self, pair: _TracedPair, *, restores: bool) -> None:
        assert len(pair.exact.groups) >= 1
        self._pair, self._restores = pair, restores
        self._truth = [dict(group) for group in pair.exact.groups]
        self._streams = [[_Stream(dict(group)) for group in pair.lossy.groups]]
        self._rows: list[TraceRow] = []
        head = pair.lossy.segments[-1].products
        self._head = head[-1]
        self._inputs: dict[int, list[Tensor]] = {}
        self._truth_inputs: list[Tensor] = []
        self._head_weights: tuple[Tensor, Tensor] | None = None

    def advance(self, segment: LayerSegment) -> None:
        """Run a segment in all streams, and start a stream for each operation."""
        exact, lossy = self._pair.exact.load(segment), self._pair.lossy.load(segment)
        skip = frozenset({self._head})
        wanted = self._watched_step(self._pair.exact, segment, exact, self._truth, skip)
        before = [dict(s.values) for s in self._streams[0]]
        found = self._watched_step(self._pair.lossy, segment, lossy, before, skip)
        groups: dict[tuple[str, str], list[Node]] = {}
        for node in segment.products:
            facts = info(node)
            place = "head" if facts.layer is None else f"layer {facts.layer}"
            groups.setdefault((place, facts.tensor_group or node.name), []).append(node)
        fresh: list[list[_Stream]] = []
        for (place, group), nodes in groups.items():
            row = self._measure(place, group, nodes, exact, lossy, wanted, found)
            self._rows.append(row)
            if self._restores and self._head not in nodes and row.own_error != 0.0:
                weights = {**lossy, **{n: exact[n] for n in _weights_of(nodes)}}
                values = [dict(s.values) for s in self._streams[0]]
                ended = self._step(self._pair.lossy, segment, weights, values, skip)
                index = len(self._rows) - 1
                fresh.append([_Stream(each, index) for each in ended])
        for stream in self._streams[1:]:
            ended = self._step(
                self._pair.lossy, segment, lossy, [s.values for s in stream], skip, stream[0].row
            )
            for one, own in zip(stream, ended, strict=True):
                one.values = own
        for plain, own in zip(self._streams[0], before, strict=True):
            plain.values = own
        if self._head in segment.nodes:
            weight = self._head.args[1]
            assert isinstance(weight, Node)
            self._head_weights = exact[weight], lossy[weight]
            self._truth_inputs = [wanted[self._head]]
            self._inputs[-1] = [found[self._head]]
        self._streams += fresh

    def finish(self, report: Callable[[int, int], None]) -> LossTrace:
        """Compare all streams with fp32."""
        assert self._head_weights is not None
        exact_VC, lossy_VC = self._head_weights
        wanted = torch.cat(self._truth_inputs) @ exact_VC.T
        truth, guesses = wanted.log_softmax(-1), wanted.argmax(-1)

        def score(hidden_TC: Tensor, head_VC: Tensor) -> tuple[float, int]:
            found = hidden_TC @ head_VC.T
            right = int((found.argmax(-1) == guesses).sum())
            kl = (truth.exp() * (truth - found.log_softmax(-1))).sum(-1)
            return float(kl.mean()), right

        hidden = torch.cat(self._inputs[-1])
        kl, right = score(hidden, lossy_VC)
        rows = dict(enumerate(self._rows))
        restored = {row: torch.cat(x) for row, x in self._inputs.items() if row >= 0}
        for done, (row, inputs) in enumerate(restored.items()):
            report(done, len(restored))
            rows[row] = _with_gain(rows[row], kl, right, *score(inputs, lossy_VC))
        for index, each in rows.items():
            if each.place == "head" and self._restores:
                rows[index] = _with_gain(each, kl, right, *score(hidden, exact_VC))
        found = sorted(rows.values(), key=_loss, reverse=True)
        return LossTrace(tuple(found), right / guesses.numel(), kl, guesses.numel())

    def _watched_step(
        self,
        forward: LayeredForward,
        segment: LayerSegment,
        weights: Mapping[Node, Tensor],
        groups: list[dict[Node, Tensor]],
        skip: frozenset[Node],
    ) -> dict[Node, Tensor]:
        """Run a segment in place. Return its dense products' inputs."""
        inputs: dict[Node, list[Tensor]] = {}

        def watch(node: Node, arguments: tuple[Any, ...]) -> None:
            if node.target is ops.linear.overload:
                inputs.setdefault(node, []).append(arguments[0])

        for index, group in enumerate(groups):
            groups[index] = forward.step(segment, weights, group, watch, skip=skip)
        return {node: torch.cat(parts) for node, parts in inputs.items()}

    def _step(
        self,
        forward: LayeredForward,
        segment: LayerSegment,
        weights: Mapping[Node, Tensor],
        groups: Iterable[dict[Node, Tensor]],
        skip: frozenset[Node],
        row: int | None = None,
    ) -> list[dict[Node, Tensor]]:
        def watch(node: Node, arguments: tuple[Any, ...]) -> None:
            if node is self._head and row is not None:
                self._inputs.setdefault(row, []).append(arguments[0])

        return [forward.step(segment, weights, group, watch, skip=skip) for group in groups]

    def _measure(
        self,
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


def _weights_of(nodes: Iterable[Node]) -> list[Node]:
    return [weight for node in nodes if isinstance(weight := node.args[1], Node)]


def _with_gain(row: TraceRow, kl: float, right: int, own_kl: float, own_right: int) -> TraceRow:
    return replace(row, kl_gain=kl - own_kl, flips=own_right - right)


def _loss(row: TraceRow) -> tuple[float, float]:
    return (row.kl_gain if row.kl_gain is not None else -1.0, row.own_error or 0.0)
