"""Targets by name. A target imports its libraries on first use."""

from __future__ import annotations

from importlib import import_module

from tilewright.compiler.targets.interface.base import Target
from tilewright.errors import ConfigError, allowed

_TARGETS = {
    "reference": ("tilewright.compiler.targets.reference", "ReferenceTarget"),
    "null": ("tilewright.compiler.targets.null", "NullTarget"),
    "cpu": ("tilewright.compiler.targets.cpu.onnxruntime.target", "CpuTarget"),
    "cpu-native": ("tilewright.compiler.targets.cpu.native.target", "NativeTarget"),
    "cuda": ("tilewright.compiler.targets.cuda.target", "CudaTarget"),
    "n150": ("tilewright.compiler.targets.tenstorrent", "N150"),
    "n300": ("tilewright.compiler.targets.tenstorrent", "N300"),
    "t3k": ("tilewright.compiler.targets.tenstorrent", "T3K"),
    "tg": ("tilewright.compiler.targets.tenstorrent", "TG"),
    "p100": ("tilewright.compiler.targets.tenstorrent", "P100"),
    "p150": ("tilewright.compiler.targets.tenstorrent", "P150"),
    "p300": ("tilewright.compiler.targets.tenstorrent", "P300"),
    "qb2": ("tilewright.compiler.targets.tenstorrent", "QB2"),
    "loudbox": ("tilewright.compiler.targets.tenstorrent", "LOUDBOX"),
    "bh-galaxy": ("tilewright.compiler.targets.tenstorrent", "BH_GALAXY"),
}


def target_names() -> tuple[str, ...]:
    """List the names of all targets, as ``--target`` takes them."""
    return tuple(_TARGETS)


def get_target(name: str) -> Target:
    """Return the target of this name. Import its libraries at the first call.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in _TARGETS:
        raise ConfigError(f"unknown target {name!r}; {allowed(_TARGETS, name)}")
    module, class_name = _TARGETS[name]
    found = getattr(import_module(module), class_name)()
    assert isinstance(found, Target)
    return found
