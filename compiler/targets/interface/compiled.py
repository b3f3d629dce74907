"""A compiled model, and checks of options common to all targets. Imports no torch."""

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
    """An executable with its options and the messages from passes.

    Attributes:
        executable: The executable.
        target: Target name.
        compute: ``fast`` or ``exact``.
        precision: The resolved configuration.
        notes: Messages from passes.
        graph: Returns the lowered graph, from disk if the program was loaded.
        places: Sharding of weights: tensor group, axis, and size per rank. Empty: a single rank.
    """

    executable: Executable
    target: str
    compute: str
    precision: PrecisionSummary
    notes: tuple[str, ...]
    graph: Callable[[], GraphModule]
    places: tuple[tuple[str, str, str], ...] = ()


def check_options(options: CompileOptions, max_positions: int) -> None:
    """Reject options that no target supports.

    Raises:
        ConfigError: Batch, threads or ranks are invalid, or a mode is unknown.
        CompileError: The context exceeds the model's limit.
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
    """Ignore progress."""
