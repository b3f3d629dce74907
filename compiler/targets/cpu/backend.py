"""Default backend of target ``cpu``: native kernels if they are built or can be built, else ONNX
Runtime.
"""

from __future__ import annotations

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.library.build import is_built
from tilewright.compiler.targets.interface.base import Progress
from tilewright.errors import CompileError

ONNXRUNTIME, NATIVE = "cpu", "cpu-native"
"""Full names of the targets by backend."""

_NAMED = {"cpu-onnxruntime": ONNXRUNTIME}

_BUILDING = "building the CPU kernels, once"


def choose_backend(progress: Progress) -> tuple[str, str]:
    """Return the full name for target ``cpu``, and a line with the reason.

    Build the native library if necessary. It has kernels for every architecture.
    """
    if not is_built():
        progress(_BUILDING, 0, 1)
    try:
        best = lib.library().tw_best_isa()
    except CompileError as error:
        reason = str(error).removeprefix("backend native: ").partition("; allowed")[0]
        return ONNXRUNTIME, f"backend auto: onnxruntime, for native cannot be built: {reason}"
    if not best:
        return ONNXRUNTIME, "backend auto: onnxruntime, for native is slow on this processor"
    return NATIVE, f"backend auto: native, {lib.ISA_NAMES[best]}"


def full_name(target: str, progress: Progress) -> str:
    """Return a target's full name for a user's name.

    ``cpu`` becomes the result of :func:`choose_backend`. ``cpu-onnxruntime`` and ``cpu-native``
    select a backend. Other names are unchanged.
    """
    if target == "cpu":
        return choose_backend(progress)[0]
    return _NAMED.get(target, target)
