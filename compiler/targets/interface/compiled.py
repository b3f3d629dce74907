"""A compiled model, and the options that any target takes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.compiler.precision import PrecisionSummary
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.modes import COMPUTE_MODES, COPIES
from tilewright.errors import CompileError, ConfigError, allowed

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class Compiled:
    """An executable, what it was asked to be, and what the passes had to say.

    ``graph`` gives the lowered graph; it is read from disk where the program came from there.
    ``places``: of a rank's program, which axes of each tensor group's weights are dealt, and the
    size of each rank's share.
    """

    executable: Executable
    target: str
    compute: str
    precision: PrecisionSummary
    notes: tuple[str, ...]
    graph: Callable[[], GraphModule]
    places: tuple[tuple[str, str, str], ...] = ()


def check_options(options: CompileOptions, max_positions: int) -> None:
    """Refuse a batch, a context, threads, ranks or a compute mode that no target could serve.

    Raises:
        ConfigError: a batch, context or ranks out of range, or an unknown compute mode.
    """
    options.parallel.check()
    if options.compute not in COMPUTE_MODES:
        raise ConfigError(f"compute {options.compute!r}; {allowed(COMPUTE_MODES, options.compute)}")
    if options.copies not in COPIES:
        raise ConfigError(f"copies {options.copies!r}; {allowed(COPIES, options.copies)}")
    if options.max_batch < 1:
        raise ConfigError(f"batch size {options.max_batch}; allowed: 1 or more")
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError(f"{options.num_threads} threads; allowed: 1 or more")
    if not 1 <= options.max_context <= max_positions:
        raise CompileError(
            f"context of {options.max_context} positions; the model allows 1 to {max_positions}"
        )


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that reports nothing."""
