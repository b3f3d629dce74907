"""Formats of cached keys and values by layer, selected by measured sensitivity.

Float arithmetic on weights in formats, with rounded keys and values. Excludes speed, activation
formats and fidelity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

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
from tilewright.evaluate.tracing.logits import Observed, compare

KEY_CACHE = "kv_cache"
"""The keys' group, if the values have a format of their own."""
GUARD = 1.0
"""Standard errors between the measured KL and its bound."""
_POSITIONS = 1024
"""Positions in byte counts, so that partial bytes are whole."""

CacheFormats: TypeAlias = Mapping[SweepUnit, str]
"""Format names by layer, for keys (`KEY_CACHE`) and values (`VALUE_CACHE`)."""
_Groups = Sequence[Mapping[Node, Tensor]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Mean KL against an unrounded cache in nats, and its standard error."""

    kl: float
    error: float

    @classmethod
    def of(cls, observed: Observed) -> Divergence:
        """Return the mean over all positions."""
        return cls(float(observed.kl.mean()), float(observed.kl.std() / observed.kl.numel() ** 0.5))

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
    """A forward with rounded keys and values in some layers."""

    formats: CacheFormats = MappingProxyType({})

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
        self._start: _Groups = list(self._forward.groups)
        self._head = self._forward.segments[-1].products[-1]
        self.units = tuple(
            unit for segment in self._forward.segments for unit in _units_of(segment)
        )
        if not self.units:
            raise ConfigError(f"{model.name}: has no cached keys and values")
        self._truth: Observed | None = None

    def outputs(self, formats: CacheFormats) -> tuple[Tensor, Tensor]:
        """Return the head's inputs and weight, with these formats."""
        groups = self._start
        for segment in self._forward.segments:
            weights = self._forward.load(segment)
            groups, hidden = self._step(segment, weights, groups, formats)
        return hidden, weights[self._head.args[1]]  # type: ignore[index]

    def observe(self, formats: CacheFormats) -> Observed:
        """Compare the model with these formats to an unrounded cache."""
        if self._truth is None:
            self._truth = compare(*self.outputs({}), None)
        return compare(*self.outputs(formats), self._truth)

    def losses(
        self, names: Sequence[str], progress: Progress = silent
    ) -> dict[tuple[SweepUnit, str], Divergence]:
        """Return the divergence with a single rounded unit, for all units and formats."""
        plain, rounded = self._start, dict[tuple[SweepUnit, str], _Groups]()
        inputs: dict[tuple[SweepUnit, str], Tensor] = {}
        segments = self._forward.segments
        for index, segment in enumerate(segments):
            progress("cache formats", index, len(segments))
            weights, before = self._forward.load(segment), plain
            plain, hidden = self._step(segment, weights, before, {})
            for key, groups in rounded.items():
                rounded[key], inputs[key] = self._step(segment, weights, groups, {})
            for key in ((unit, name) for unit in _units_of(segment) for name in names):
                rounded[key], _ = self._step(segment, weights, before, dict([key]))
        head_VC = weights[self._head.args[1]]  # type: ignore[index]
        self._truth = truth = compare(hidden, head_VC, None)
        return {key: Divergence.of(compare(x, head_VC, truth)) for key, x in inputs.items()}

    def _step(
        self,
        segment: LayerSegment,
        weights: Mapping[Node, Tensor],
        groups: _Groups,
        formats: CacheFormats,
    ) -> tuple[_Groups, Tensor]:
        """Run a segment without the head. Return the values, and the head's inputs."""
        inputs: list[Tensor] = []

        def watch(node: Node, arguments: tuple[Any, ...]) -> None:
            if node is self._head:
                inputs.append(arguments[0])

        self._forward.formats = formats
        how: dict[str, Any] = {"skip": frozenset({self._head})}
        ended = [self._forward.step(segment, weights, group, watch, **how) for group in groups]
        return ended, torch.cat(inputs) if inputs else torch.empty(0)


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
        measured[index] = Divergence.of(probe.observe(path[index]))
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
