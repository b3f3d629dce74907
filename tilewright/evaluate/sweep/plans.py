"""Plans: configurations of models as cells in order.

Accuracy precedes speed, and the base is first. Speed is measured in rounds with configurations in
turn, so that disturbances of the machine affect all configurations. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.compiler.devices import BOARDS, DEVICES
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.precision.names import VALUE_CACHE
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import CASES, PRECISIONS, check_case
from tilewright.evaluate.results.record import check_plain
from tilewright.evaluate.search.levels import Level, SweepUnit, assign
from tilewright.evaluate.sweep.model import SweptModel, experts_share, step_bytes
from tilewright.evaluate.sweep.trial import Trial

PUBLISHED = (
    *(f"mlp-{up}-{down}" for up in ("bfp4", "bfp8", "bf16") for down in ("bfp4", "bfp8", "bf16")),
    *(f"wo-bfp4-activation-{activation}" for activation in ("bf16", "bfp8", "mixed")),
)
"""The twelve settings published for Tenstorrent's boards."""

NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"table": tuple(PRECISIONS), "pareto": PUBLISHED, "grid": ()}
)
"""Configurations of a plan, in addition to the base."""

SPEED_CASE, ACCURACY_CASE = "performance-ci-1", "performance-top-1"
BATCH_CASE = "performance-ci-32"
MAX_CELLS = 1000

ALL = "all"
"""Name of the part that lowers every group at once."""


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """A configuration of a model on a target.

    Attributes:
        part: lowered part in a sensitivity plan.
        is_timed: whether speed is measured.
        calibration: see `Trial`. No effect on weights that every method rounds to nearest.
    """

    model: SweptModel
    target: str
    device: str
    precision: PrecisionConfig
    part: str = ""
    is_timed: bool = True
    calibration: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Measurements per configuration: every speed case in ``rounds``, each accuracy case once.

    Attributes:
        first_round: first round, above 0 for additional rounds.
        text: text for accuracy. None: the default text.
        speculative: see `Trial`.
    """

    cases: tuple[str, ...] = (SPEED_CASE, ACCURACY_CASE)
    rounds: int = 3
    first_round: int = 0
    compute: str = "fast"
    threads: int | None = None
    text: str | None = None
    speculative: str = ""

    def count(self, num_entries: int) -> int:
        """Return the cell count for ``num_entries`` configurations."""
        each = sum(1 if CASES[name].token_accuracy else self.rounds for name in self.cases)
        return num_entries * each


def devices_of(target: str) -> tuple[str, ...]:
    """Return a target's devices. Targets on the host have the device CPU."""
    return tuple(d.name for d in DEVICES.values() if d.target == target) or ("CPU",)


def entries(
    models: Sequence[SweptModel],
    targets: Sequence[str],
    devices: Sequence[str],
    precisions: Sequence[PrecisionConfig],
) -> list[SweepConfig]:
    """Return a grid's entries. Without ``devices``, each target has all of its devices.

    Raises:
        ConfigError: for a device without a target.
    """
    for device in devices:
        if not any(device in devices_of(target) for target in targets):
            known = [name for target in targets for name in devices_of(target)]
            raise ConfigError(
                f"device {device[:60]!r}: no target here runs on it; {allowed(known, device)}"
            )
    return [
        SweepConfig(model, target, device, precision)
        for model in models
        for target in targets
        for device in devices_of(target)
        if not devices or device in devices
        for precision in precisions
    ]


def sensitivity_entries(
    model: SweptModel,
    target: str,
    device: str,
    *,
    base: PrecisionConfig,
    level: Level,
    calibration: str = "",
    cache_layers: bool = False,
) -> list[SweepConfig]:
    """Return the base, every group lowered to ``level``, all groups together, then single layers.

    Includes the cache and the activations as groups. ``cache_layers`` also lowers the cache in
    single layers with attention, and on boards its values only. Only groups are timed, because a
    single layer is below the noise.
    """
    groups = [g for g in (*model.groups(), "kv_cache", "activation") if level.is_for(g)]
    products = [group for group in groups if group in model.groups() and group != "embedding"]
    chosen = {str(SweepUnit(group)): {SweepUnit(group): level} for group in groups}
    chosen[ALL] = {SweepUnit(group): level for group in products}
    by_layer = {group: model.layers(group) for group in products}
    if cache_layers and "kv_cache" in groups:
        by_layer["kv_cache"] = model.layers("wqkv")
        if target in BOARDS:  # all other targets store values in the format of keys
            by_layer[VALUE_CACHE] = by_layer["kv_cache"]
    for layer in range(model.num_layers):
        parts = [SweepUnit(group, layer) for group, layers in by_layer.items() if layer in layers]
        chosen |= {str(part): {part: level} for part in parts}
    found = [SweepConfig(model, target, device, base)]
    places = model.places()
    for name, choices in chosen.items():
        precision = assign(
            base,
            choices,
            name=f"{name}={level}",
            num_layers=model.num_layers,
            groups=places,
            model_name=model.name,
        )
        is_timed = "." not in name
        found.append(SweepConfig(model, target, device, precision, name, is_timed, calibration))
    return found


def cells(found: Sequence[SweepConfig], measures: Measures) -> list[Trial]:
    """Return the configurations' cells without duplicates.

    Raises:
        ConfigError: for an unknown case, or a case or configuration that does not fit a model.
    """
    for model in {id(entry.model): entry.model for entry in found}.values():
        limit = model.loaded.config.max_positions
        for name in measures.cases:
            check_case(CASES[name], max_context=limit, max_data_parallel=1)
    made = [_cell(entry, measures) for entry in found]
    timed = [cell for cell, entry in zip(made, found, strict=True) if entry.is_timed]
    planned = [
        replace(cell, kind="accuracy", case=name, text=measures.text)
        for name in measures.cases
        if CASES[name].token_accuracy
        for cell in made
    ]
    planned += [
        replace(cell, case=name, round=number, speculative=measures.speculative)
        for number in range(measures.first_round, measures.first_round + measures.rounds)
        for name in measures.cases
        if not CASES[name].token_accuracy
        for cell in timed
        # A prediction is equal in every round.
        if number == measures.first_round or cell.target not in BOARDS
    ]
    return unique(planned)  # the base is first and keeps its name


def unique(found: Sequence[Trial]) -> list[Trial]:
    """Return the first of all cells with the same measurement."""
    kept: dict[str, Trial] = {}
    for cell in found:
        kept.setdefault(cell.id, cell)
    return list(kept.values())


def _cell(entry: SweepConfig, measures: Measures) -> Trial:
    model, resolved = entry.model, entry.model.resolve(entry.precision)
    check_plain("precision", entry.precision.name)
    stored = model.stored_bytes(resolved, entry.target, measures.compute)
    calibration = entry.calibration if model.has_calibrated(resolved) else ""
    return Trial(
        model=model.argument,
        model_name=model.name,
        model_hash=model.content_hash,
        target=entry.target,
        device=entry.device,
        precision=entry.precision.name,
        precision_id=resolved.id,
        heading=resolved.heading(),
        case=SPEED_CASE,
        kind="speed",
        compute="exact" if measures.compute == "exact" else "fast",
        threads=measures.threads,
        weight_bytes=sum(stored.values()),
        step_bytes=step_bytes(stored, experts_share(model.loaded, CASES[SPEED_CASE].batch_size)),
        part=entry.part,
        is_kept=entry.is_timed,
        calibration=calibration,
    )
