"""Which backend runs target ``cpu`` where nobody chose one: the native kernels where they are built
or can be, and have what the model needs; else ONNX Runtime.
"""

from __future__ import annotations

from typing import Any, Protocol

from tilewright.compiler.errors import CompileError
from tilewright.compiler.precision import EXPERT_GROUPS
from tilewright.compiler.targets.base import Progress
from tilewright.compiler.targets.cpu.native import library as lib
from tilewright.compiler.tracer import grouped_modules

ONNXRUNTIME, NATIVE = "cpu", "cpu-native"
"""The targets' full names, by what runs them."""

_BUILDING = "building the CPU kernels, once"


class Chosen(Protocol):
    """What is looked at of a model."""

    @property
    def module(self) -> Any: ...
    @property
    def config(self) -> object: ...


def choose_backend(model: Chosen, progress: Progress) -> tuple[str, str]:
    """Choose the full name of the target that ``cpu`` stands for, and give a line that says why.

    The native library is built now where it was not.
    """
    if lacking := kernels_lacking(model):
        return ONNXRUNTIME, f"backend auto: onnxruntime, for native has no kernels for {lacking}"
    progress(_BUILDING, 0, 1)
    try:
        best = lib.library().tw_best_isa()
    except CompileError as error:
        reason = str(error).removeprefix("backend native: ").partition("; allowed")[0]
        return ONNXRUNTIME, f"backend auto: onnxruntime, for native cannot be built: {reason}"
    progress(_BUILDING, 1, 1)
    name = lib.ISA_NAMES[best]
    if not best:
        return ONNXRUNTIME, "backend auto: onnxruntime, for native is slow on this processor"
    return NATIVE, f"backend auto: native, {name}"


def kernels_lacking(model: Chosen) -> str:
    """Name what a model has that the native library has no kernels for; empty where it has all."""
    if any(each.group in EXPERT_GROUPS for each in grouped_modules(model.module)):
        return "experts"
    if any(getattr(model.config, "linear_layers", ())):
        return "linear attention"
    return ""
