"""The options of an engine for many requests, said once for ``tilewright serve`` and ``batch``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.cli.terminal.notes import without_details
from tilewright.compiler.targets.interface.modes import COPIES
from tilewright.options.arguments import integer, option, real

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Progress
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.loading.source import Source
    from tilewright.options.arguments import ModelOptions
    from tilewright.runtime.scheduling.request_state import Policy

AUTO, STRICT, FAST = "auto", "strict", "fast"
FEW_SEATS = 16
"""Number of open sequences up to which strict decode steps cost a GPU nothing."""
MAX_SEATS, _LEAST_SEATS = {"cuda": 256, "cpu": 16}, 8
_MAX_CONTEXT = 4096
_ENGINE = "engine"


def default_seats(target: str) -> int:
    """Return the maximum number of running requests of a target, before its memory is known."""
    return MAX_SEATS.get(target.split("-")[0], _LEAST_SEATS)


def seats_or_auto(text: str) -> int | None:
    """Parse ``--max-num-seqs``: None for ``auto``."""
    if text == AUTO:
        return None
    try:
        return integer(1, 4096)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: auto, or integers, 1 to 4096"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """How an engine is compiled and what it may take; ``max_context`` is None for the model's."""

    max_context: int | None = option(
        f"positions of a request (default: the model's, up to {_MAX_CONTEXT})",
        "--max-context",
        "--max-model-len",
        group=_ENGINE,
        type=integer(2, 1 << 24),
    )
    step_tokens: int = option(
        "of prompts in one step, at most",
        "--step-tokens",
        "--max-num-batched-tokens",
        default=8192,
        group=_ENGINE,
        type=integer(1, 1 << 20),
    )
    memory_fraction: float = option(
        "of a GPU's memory, what weights and state of this process may take",
        "--memory-fraction",
        "--gpu-memory-utilization",
        default=0.92,
        group=_ENGINE,
        type=real(0, 1, above=True),
    )
    copies: str = option(
        "weights in block formats, once more as a GPU multiplies many rows with fastest: auto, "
        "where that leaves three quarters of the pages, or room for every context; none; codes: "
        "FP8 alone, which lofi on bfp4 means (auto falls back on it); all. FP8 is made with "
        "--arithmetic fast alone",
        default="auto",
        group=_ENGINE,
        choices=COPIES,
    )
    arithmetic: str = option(
        "strict: what a request gets does not depend on what runs beside it, where the target can; "
        "fast: prompts may take other kernels, piece by piece, and on a GPU bfp4 weights at lofi "
        f"are multiplied in FP8; auto: strict, but fast on a GPU while more than {FEW_SEATS} "
        "requests run (batch: if more may run)",
        default=AUTO,
        group=_ENGINE,
        choices=(AUTO, STRICT, FAST),
    )
    host_cache: float = option(
        "GB of host memory for the state of requests that make room, and as much for that of "
        "sequences that later prompts may continue",
        default=4.0,
        group=_ENGINE,
        metavar="GB",
        type=real(0, 1 << 20),
    )
    no_prefix_cache: bool = option(
        "compute every prompt whole",
        "--no-prefix-cache",
        "--no-enable-prefix-caching",
        default=False,
        group=_ENGINE,
    )
    threads: int | None = option(
        "CPU threads, of all replicas together", group=_ENGINE, type=integer(1, 1024)
    )
    no_cache: bool = option("compile anew and keep nothing", default=False, group=_ENGINE)
    verbose: bool = option(
        "log the notes of the compiler", "-v", "--verbose", default=False, group=_ENGINE
    )

    @property
    def context(self) -> int:
        """Positions of a request, if the model has so many."""
        return self.max_context or _MAX_CONTEXT

    def arithmetic_of(self, target: str, seats: int) -> str:
        """Return ``strict``, ``fast``, or ``auto``: strict while at most ``FEW_SEATS`` run."""
        if self.arithmetic != AUTO:
            return self.arithmetic
        return AUTO if target == "cuda" and seats > FEW_SEATS else STRICT

    def compile(
        self,
        source: Source,
        model: ModelOptions,
        *,
        seats: int | None,
        progress: Progress,
        ends_process: bool = False,
    ) -> Compiled:
        """The executable of a model for so many sequences at a time; its notes are said. ``seats``
        of None: as many as the target and its memory allow.
        ``ends_process``: see `compile_source`.

        Raises:
            TilewrightError: where the model, its precision and the target do not fit together.
        """
        from tilewright.compiler.targets.interface.base import CompileOptions
        from tilewright.loading.source import compile_source
        from tilewright.serve.web.server_log import say

        least = None
        if seats is None:
            seats = default_seats(model.target)
            least = min(seats, _LEAST_SEATS)
        arithmetic = self.arithmetic_of(model.target, seats)
        options = CompileOptions(
            max_batch=seats,
            least_batch=least,
            max_context=min(self.context, source.max_positions),
            compute=model.compute,
            num_threads=self.threads,
            memory_fraction=self.memory_fraction,
            is_strict=arithmetic == STRICT,
            strict_rows=FEW_SEATS if arithmetic == AUTO else 0,
            copies=self.copies,
            max_step_tokens=self.step_tokens,
        )
        use_cache = not self.no_cache
        compiled = compile_source(
            source, model, options, progress, use_cache=use_cache, ends_process=ends_process
        )
        for note in without_details(compiled.notes, is_verbose=self.verbose):
            say(note)
        return compiled

    def policy(self, **others: Any) -> Policy:
        """How requests are scheduled; ``others``: what is not said by these options."""
        from tilewright.runtime.scheduling.request_state import Policy

        return Policy(
            step_tokens=self.step_tokens,
            reuses=not self.no_prefix_cache,
            host_bytes=int(self.host_cache * 1e9),
            **others,
        )
