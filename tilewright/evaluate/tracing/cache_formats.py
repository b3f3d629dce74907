"""Formats of cached keys and values by layer, selected by measured sensitivity.

Float arithmetic on weights in formats, with rounded keys and values. Excludes speed, activation
formats and fidelity. A run with a single rounded unit differs little from the run without: its
products are those of the run without, plus products of the differences in the fast type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.calibration.forward import (
    LayeredForward,
    LayerSegment,
    Weights,
    product_dtype,
)
from tilewright.compiler.driver import (
    CompilableModel,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.recipe import load_values
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.precision.names import VALUE_CACHE
from tilewright.compiler.targets.interface.base import Progress
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.pipeline import MATCH, PRECISION
from tilewright.errors import ConfigError
from tilewright.evaluate.search.candidates import LevelOption, first_meeting, plan_path
from tilewright.evaluate.search.found_yaml import render
from tilewright.evaluate.search.levels import Level, SweepUnit
from tilewright.evaluate.tracing.logits import divergences

KEY_CACHE = "kv_cache"
"""The keys' group, if the values have a format of their own."""
GUARD = 1.0
"""Standard errors between the measured KL and its bound."""
_POSITIONS = 1024
"""Positions in byte counts, so that partial bytes are whole."""

CacheFormats: TypeAlias = Mapping[SweepUnit, str]
"""Format names by layer, for keys (`KEY_CACHE`) and values (`VALUE_CACHE`)."""
_KEPT_NUMBERS = 1 << 29
"""Maximum number of weights that stay loaded between runs."""
_Values: TypeAlias = Mapping[Node, Tensor]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Mean KL against an unrounded cache in nats, and its standard error."""

    kl: float
    error: float

    @classmethod
    def of(cls, kl_T: Tensor) -> Divergence:
        """Return the mean over all positions."""
        return cls(float(kl_T.mean()), float(kl_T.std() / kl_T.numel() ** 0.5))

    def is_within(self, max_kl: float) -> bool:
        """Return whether the divergence is below a bound, with a margin of `GUARD`."""
        return self.kl + GUARD * self.error <= max_kl


@dataclass(frozen=True, slots=True)
class CacheSelection:
    """Measured losses, and the smallest selection within the bound.

    Attributes:
        losses: Divergence with a single rounded unit, by unit and format.
        formats: Selected formats.
        measured: Divergence of the selection.
        bits: Mean bits per cached number.
    """

    losses: Mapping[tuple[SweepUnit, str], Divergence]
    formats: CacheFormats
    measured: Divergence
    bits: float


class _CacheForward(LayeredForward):
    """A forward with rounded keys and values in some layers.

    Attributes:
        formats: Formats of this run.
        plain: Inputs, outputs and rounded weights of products in the run without formats, which
            records them. None: runs have whole products.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.formats: CacheFormats = {}
        self.plain: dict[Node, tuple[Tensor, Tensor, Tensor]] | None = None
        self._loaded: dict[LayerSegment, dict[Node, Tensor]] = {}
        self._off: tuple[Tensor, Tensor] | None = None

    def load(self, segment: LayerSegment) -> dict[Node, Tensor]:
        if segment in self._loaded:
            return self._loaded[segment]
        weights = super().load(segment)
        known = [weights, *self._loaded.values()]
        if sum(x.numel() for tensors in known for x in tensors.values()) <= _KEPT_NUMBERS:
            self._loaded[segment] = weights
        return weights

    def _product(self, node: Node, arguments: tuple[Any, ...]) -> Tensor:
        if self.plain is None or node.target is not ops.linear.overload:
            return super()._product(node, arguments)
        x, weight, *_ = arguments
        if node not in self.plain:
            whole = super()._product(node, arguments)
            self.plain[node] = x, whole, weight.to(product_dtype(x.device))
            return whole
        plain_x, whole, rounded = self.plain[node]
        if self._off is None or self._off[0] is not x:  # several products read an input
            self._off = x, (x - plain_x).to(rounded.dtype)
        return torch.nn.functional.linear(self._off[1], rounded).to(whole.dtype).add_(whole)

    def _call(self, node: Node, arguments: tuple[Any, ...]) -> Any:
        if node.target is ops.attention.overload and self.formats:
            q, k, v, *rest = arguments
            k, v = (
                self._rounded(x, SweepUnit(group, info(node).layer))
                for group, x in ((KEY_CACHE, k), (VALUE_CACHE, v))
            )
            arguments = (q, k, v, *rest)
        return super()._call(node, arguments)

    def _rounded(self, x: Tensor, unit: SweepUnit) -> Tensor:
        """Return values in the unit's format. Blocks run along a head's dimensions."""
        name = self.formats.get(unit)
        return x if name is None else get_format(name).round_trip(x).to(x.dtype)


class CacheProbe:
    """A model and a text, to measure cache formats.

    Raises:
        ConfigError: for a model without cached keys and values.
    """

    def __init__(
        self, model: CompilableModel, precision: PrecisionConfig, tokens_ST: Tensor
    ) -> None:
        resolved = resolve_precision(model, precision)
        graph, _ = lower_model(model, resolved, (MATCH, PRECISION), silent)
        source, cpu = weight_source(model, model.config.max_positions), torch.device("cpu")
        how: dict[str, Any] = {"weight_of": load_values, "exact": True}
        self._forward = _CacheForward(graph, source, tokens_ST, cpu, **how)
        self._head = self._forward.segments[-1].products[-1]
        self.units = tuple(
            unit for segment in self._forward.segments for unit in _units_of(segment)
        )
        if not self.units:
            raise ConfigError(f"{model.name}: has no cached keys and values")
        self._truth: Tensor | None = None

    def outputs(self, formats: CacheFormats) -> tuple[Tensor, Tensor]:
        """Return the head's inputs and weight, with these formats."""
        groups: Sequence[_Values] = self._forward.groups
        for segment in self._forward.segments:
            weights = self._forward.load(segment)
            hidden: list[Tensor] = []
            groups = [self._step(segment, weights, group, formats, hidden) for group in groups]
        return torch.cat(hidden), weights[self._head.args[1]]  # type: ignore[index]

    def measure(self, formats: CacheFormats) -> Divergence:
        """Return the divergence with these formats from an unrounded cache."""
        if self._truth is None:
            self._truth = self.outputs({})[0]
        hidden, head_VC = self.outputs(formats)
        return Divergence.of(divergences([hidden], self._truth, head_VC)[0])

    def losses(
        self, names: Sequence[str], progress: Progress = silent
    ) -> dict[tuple[SweepUnit, str], Divergence]:
        """Return the divergence with a single rounded unit, for all units and formats."""
        plain: list[_Values] = list(self._forward.groups)
        rounded: dict[tuple[SweepUnit, str], list[_Values]] = {}
        segments = self._forward.segments
        for index, segment in enumerate(segments):
            progress("cache formats", index, len(segments))
            weights, truth = self._forward.load(segment), list[Tensor]()
            inputs: dict[tuple[SweepUnit, str], list[Tensor]] = {key: [] for key in rounded}
            own = [(unit, name) for unit in _units_of(segment) for name in names]
            rounded |= {key: list(plain) for key in own}
            for group, before in enumerate(plain):
                self._forward.plain = {}
                plain[group] = self._step(segment, weights, before, {}, truth)
                for key, groups in rounded.items():
                    formats = dict([key]) if key in own else {}
                    hidden = inputs.setdefault(key, [])
                    groups[group] = self._step(segment, weights, groups[group], formats, hidden)
        self._forward.plain = None
        self._truth = torch.cat(truth)
        runs = [torch.cat(parts) for parts in inputs.values()]
        head_VC = weights[self._head.args[1]]  # type: ignore[index]
        measured = divergences(runs, self._truth, head_VC)
        return {key: Divergence.of(kl) for key, kl in zip(inputs, measured, strict=True)}

    def _step(
        self,
        segment: LayerSegment,
        weights: Weights,
        group: _Values,
        formats: CacheFormats,
        hidden: list[Tensor],
    ) -> _Values:
        """Run a segment without the head on one group. Add the head's inputs to ``hidden``."""

        def watch(node: Node, arguments: tuple[Any, ...]) -> None:
            if node is self._head:
                hidden.append(arguments[0])

        self._forward.formats = formats
        return self._forward.step(segment, weights, group, watch, skip=frozenset({self._head}))


def select_formats(
    probe: CacheProbe, names: Sequence[str], max_kl: float, progress: Progress = silent
) -> CacheSelection:
    """Select the smallest cache formats with a measured KL within a bound.

    Losses of single units order the candidates. The candidates' own KL decides.

    Raises:
        ConfigError: for a bound below the KL of the largest format everywhere.
    """
    losses = probe.losses(names, progress)
    largest = max(names, key=lambda name: get_format(name).bits)
    options = {
        unit: [_option(losses[unit, name].kl, name, largest) for name in names]
        for unit in probe.units
    }
    path: list[CacheFormats] = [
        {unit: option.level.format for unit, option in choices.items() if option.level}
        for choices in plan_path(options, "bytes")
    ]
    path.append(dict.fromkeys(probe.units, largest))
    measured: dict[int, Divergence] = {}

    def is_within(index: int) -> bool:
        measured[index] = probe.measure(path[index])
        progress("cache selection", len(measured), len(path).bit_length() + 1)
        return measured[index].is_within(max_kl)

    index = first_meeting(0, len(path) - 1, is_within)
    if index is None:
        raise ConfigError(
            f"--max-kl {max_kl:g}: {largest} everywhere has {measured[len(path) - 1].kl:.2g}; "
            "allowed: a larger bound or format"
        )
    if index not in measured:
        is_within(index)
    bits = sum(get_format(name).bits for name in path[index].values()) / len(probe.units)
    return CacheSelection(losses, path[index], measured[index], bits)


def selection_yaml(
    base: PrecisionConfig, selection: CacheSelection, provenance: Sequence[str]
) -> str:
    """Return a configuration with the selected formats and the measured reasons."""
    names = dict.fromkeys(name for _, name in selection.losses)

    def reason(unit: SweepUnit) -> str:
        costs = (f"{name} adds KL {selection.losses[unit, name].kl:.1e}" for name in names)
        return ", ".join(costs) + " (measured, rounded separately)"

    def summary(group: str) -> str:
        formats = [name for unit, name in selection.formats.items() if unit.group == group]
        counts = (f"{formats.count(name)} layers {name}" for name in names)
        return f"{'keys' if group == KEY_CACHE else 'values'}: {', '.join(counts)}"

    return render(
        base,
        {unit: Level.parse(name) for unit, name in selection.formats.items()},
        description="cache formats by measured sensitivity",
        provenance=provenance,
        reason=reason,
        group_reason=summary,
    )


def _option(kl: float, name: str, largest: str) -> LevelOption:
    bits = get_format(largest).bits - get_format(name).bits
    return LevelOption(Level.parse(name), kl, 0.0, int(bits * _POSITIONS))


def _units_of(segment: LayerSegment) -> list[SweepUnit]:
    """Return a segment's keys and values, if it has an attention."""
    layers = [info(node).layer for node in segment.nodes if node.target is ops.attention.overload]
    return [SweepUnit(group, layer) for layer in layers for group in (KEY_CACHE, VALUE_CACHE)]
