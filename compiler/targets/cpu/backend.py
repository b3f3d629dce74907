"""Which backend runs target ``cpu`` where nobody chose one: the native kernels where they are built
or can be, else ONNX Runtime.
"""

from __future__ import annotations

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.library.build import is_built
from tilewright.compiler.targets.interface.base import Progress
from tilewright.errors import CompileError

ONNXRUNTIME, NATIVE = "cpu", "cpu-native"
"""The targets' full names, by what runs them."""

_NAMED = {"cpu-onnxruntime": ONNXRUNTIME}

_BUILDING = "building the CPU kernels, once"


def choose_backend(progress: Progress) -> tuple[str, str]:
    """Choose the full name of the target that ``cpu`` stands for, and give a line that says why.

    The native library is built now where it was not. It has kernels for every architecture.
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
    """The full name of a target as a user names it: ``cpu`` is what :func:`choose_backend` says,
    ``cpu-onnxruntime`` and ``cpu-native`` are one backend whatever is here; others are as named.
    """
    if target == "cpu":
        return choose_backend(progress)[0]
    return _NAMED.get(target, target)
