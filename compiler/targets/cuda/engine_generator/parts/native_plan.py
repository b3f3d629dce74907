"""Choices of an engine that has kernels of the CUDA target."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices


@dataclass(frozen=True)
class NativeChoices(Choices):
    """Choices with kernels in CUDA C++ beside products'. They take bfloat16 on Hopper, Triton's
    all else.

    Attributes:
        native: of decode steps, "attention", "delta" (linear attention), "experts" of up to 64
            rows.
    """

    native: tuple[str, ...] = ()
