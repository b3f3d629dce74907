"""An `EngineConfig` on this machine: the model's files, the target, the precision, the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewright.compiler.artifacts.paths import is_compiled, target_of
from tilewright.compiler.devices import CPU_BACKENDS, check_gpu, check_ranks, num_gpus
from tilewright.compiler.passes.dumps import dump_folder
from tilewright.compiler.precision import AUTO, PrecisionConfig, load_precision
from tilewright.distributed.grouping import Grouping, check_devices, read_grouping
from tilewright.distributed.parallel import COLLECTIVE_BACKENDS
from tilewright.errors import ConfigError, allowed
from tilewright.models import (
    FoundModel,
    calibrated_precision,
    check_header,
    find_model_or_shape,
    quantised_types,
)
from tilewright.options.arguments import refuse_given
from tilewright.options.default_precision import (
    ChosenPrecision,
    default_precision,
    known_types,
)
from tilewright.options.engine_config import TARGETS, EngineConfig
from tilewright.utils.removed_variables import check_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """An `EngineConfig` with this machine's facts.

    Attributes:
        path: The model.
        target: Full target name. A compiled directory has its own.
        precision: None for a compiled directory, which has its own.
        notes: Automatic choices, one line each.
        is_auto: The target cpu backend is selected later. Until then ``target`` is ONNX
            Runtime's.
        grouping: The ranks.
        on_onnxruntime: The precision if ONNX Runtime runs the target cpu. None: ``precision``.
    """

    config: EngineConfig
    path: FoundModel
    target: str
    precision: PrecisionConfig | None
    notes: tuple[str, ...] = ()
    is_auto: bool = False
    grouping: Grouping = field(default_factory=Grouping)
    on_onnxruntime: ChosenPrecision | None = None

    @property
    def compute(self) -> str:
        """The arithmetic: ``fast`` or ``exact``."""
        return self.config.compute or "fast"

    @property
    def dump_dir(self) -> Path | None:
        """The directory for graphs, from the configuration or the environment."""
        return dump_folder(None if self.config.dump is None else Path(self.config.dump))

    def changed(self, **values: Any) -> ResolvedConfig:
        """Return a copy with other values of the configuration."""
        return replace(self, config=replace(self.config, **values))

    def check_ranks(self) -> None:
        """Refuse ranks of a target without ranks. Skip a target cpu without a backend.

        Raises:
            ConfigError: with the alternatives.
        """
        if not self.is_auto:
            check_ranks(self.target, self.grouping.parallel.tensor)


def resolve(config: EngineConfig, *, default: str = AUTO, runs: bool = True) -> ResolvedConfig:
    """Check a configuration. Read only the model's header, or fetch it from the hub.

    Args:
        default: The precision if ``config`` has none.
        runs: Whether this machine runs the compiled program.

    Raises:
        TilewrightError: for an unknown target or precision, a target that this machine cannot
            run, a missing or damaged model, or options that a compiled directory fixes.
    """
    check_environment()
    target = config.target or "cpu"
    if target not in TARGETS:
        raise ConfigError(f"unknown target {target!r}; {allowed(TARGETS, target)}")
    if config.backend is not None and target != "cpu":
        raise ConfigError(f"--backend {config.backend} with --target {target}; allowed: cpu")
    is_auto = target == "cpu" and config.backend in (None, AUTO)
    if config.backend not in (None, AUTO):
        target = CPU_BACKENDS[config.backend]
    grouping = read_grouping(config) if runs else Grouping()
    if config.model is not None and is_compiled(config.model):
        return _of_compiled(config, Path(config.model).expanduser(), grouping)
    if runs:
        _check_devices(target, grouping, is_auto=is_auto)
    named, notes = config.precision or default, tuple[str, ...]()
    if named != AUTO:
        load_precision(named)  # a name is checked before a model is fetched
    dump_folder(None if config.dump is None else Path(config.dump))
    found = find_model_or_shape(config.model)
    if (known := known_types(found)) is None:
        check_header(found)
    on_onnxruntime = None
    if config.precision in (None, AUTO) and (own := calibrated_precision(found)) is not None:
        named, notes = own, ("precision: of the calibrated folder",)
    elif named == AUTO:
        types = known or quantised_types(found)
        chosen, on_onnxruntime = default_precision(found, types, target, is_auto=is_auto)
        notes = (chosen.reason,)
    return ResolvedConfig(
        config=config,
        path=found,
        target=target,
        precision=chosen.precision if named == AUTO else load_precision(named),
        notes=notes,
        is_auto=is_auto,
        grouping=grouping,
        on_onnxruntime=on_onnxruntime,
    )


def _of_compiled(config: EngineConfig, path: Path, grouping: Grouping) -> ResolvedConfig:
    """Return a compiled directory's configuration."""
    refuse_given(
        config,
        ("target", "backend", "precision", "compute", "dump"),
        f"the compiled folder {path}, which was compiled with its own; allowed: without "
        "--{name}, or compile the checkpoint again",
    )
    target = target_of(path)
    if target is not None:
        _check_devices(target, grouping)
    return ResolvedConfig(
        config=config, path=path, target=target or "cpu", precision=None, grouping=grouping
    )


def _check_devices(target: str, grouping: Grouping, *, is_auto: bool = False) -> None:
    devices, exchange = grouping.parallel.devices, grouping.parallel.exchange
    named = {text: name for name, text in COLLECTIVE_BACKENDS.items()}
    if not is_auto:
        check_ranks(target, grouping.parallel.tensor)
    if target == "cuda":
        check_gpu()
        if not grouping.is_alone or devices:
            check_devices(grouping, num_gpus())
    elif devices:
        listed = ",".join(map(str, devices))
        raise ConfigError(f"--devices {listed}: target {target} has cores; allowed: --target cuda")
    elif exchange is not None:
        raise ConfigError(
            f"--collective-backend {named[exchange]}: target {target} has one of its own; allowed: "
            "--target cuda"
        )
