"""The narrow waist: what a target is, what an executable promises. Imports no torch."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tilewright.compiler.devices import check_ranks
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.capabilities import Capabilities, MemoryUse
from tilewright.compiler.targets.interface.step import Seat, Step, StepOutput
from tilewright.compiler.targets.interface.token_masks import Allowed
from tilewright.distributed.parallel import ALONE, Parallel
from tilewright.distributed.peers import Peers
from tilewright.errors import CompileError, ConfigError, NoRoomError, allowed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from tilewright.compiler.ir.info import NodeInfo
    from tilewright.compiler.ir.recipe import WeightRecipe
    from tilewright.compiler.passes.runner import Pass

Progress = Callable[[str, int, int], None]
"""Told ``(what, done, total)`` while a model is compiled."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a user may choose besides model, target and precision.

    ``compute``: ``fast``, or ``exact`` for float arithmetic everywhere (no speed is claimed).
    ``memory_fraction``: of the device's memory, what this process may take; sequences then share
    the pages that fit, and may be more than would fit at full length. None: each has room for all.
    ``is_strict``: a row's bits shall not depend on what runs beside it or where a prompt is cut, at
    some cost of speed; `Capabilities.invariant` says what comes of it. ``copies``: of weights in
    blocks, for many rows: ``auto``, where every context has room beside them, or pages keep three
    quarters of theirs, else FP8 alone; ``none``; ``codes``: FP8; ``all``. ``max_step_tokens``: of
    prompts, what a step is given, ``max_shared_tokens`` a pass of several, less where memory is
    short; room may be reserved. ``parallel``: the ranks of the model. ``rank``: whose program.
    ``least_batch``: Minimum of ``max_batch``; the target takes the largest batch between both that
    its memory allows. None: ``max_batch`` is fixed. ``strict_rows``: Maximum number of open
    sequences for strict steps, if ``is_strict`` is false. 0: no step is strict.
    """

    max_batch: int = 1
    max_context: int = 2048
    compute: str = "fast"
    num_threads: int | None = None
    memory_fraction: float | None = None
    is_strict: bool = False
    copies: str = "auto"
    max_step_tokens: int = 65_536
    max_shared_tokens: int = 65_536
    parallel: Parallel = ALONE
    rank: int = 0
    least_batch: int | None = None
    strict_rows: int = 0

    @property
    def max_strict_rows(self) -> int:
        """Maximum number of open sequences for strict steps. 0: no step is strict."""
        return sys.maxsize if self.is_strict else self.strict_rows


class Executable(ABC):
    """A compiled model with its weights and state.

    ``device_name`` and ``device_detail``: what a result calls the device (``H200``), and what
    tells it from others of the name; None where the host's description says it. ``mesh``: the
    devices it runs on, rows by columns, as results name it. ``notes``: how it is held, in lines.
    ``num_tokens``: ids from there on have no token and are never chosen, though they have logits;
    None: there are none of these. It is set before the first step.
    """

    capabilities: Capabilities
    contract: NumericContract
    vocab_size: int
    device_name: str = "CPU"
    device_detail: str | None = None
    notes: tuple[str, ...] = ()
    mesh: str = "1x1"
    num_tokens: int | None = None

    @property
    def num_choosable(self) -> int:
        """The first logits of a row: those of which one is chosen."""
        return min(self.vocab_size, self.num_tokens or self.vocab_size)

    @abstractmethod
    def step(self, step: Step) -> StepOutput:
        """Run one step, or queue it where ``runs_ahead``; what it names must be as the step says.

        A scheduler that breaks the rules of a step (a seat twice, a gap) is a bug and fails an
        assertion; nothing that a user asks for may get so far.
        """

    def choose(self, output: StepOutput, allowed: Allowed) -> None:
        """Choose the tokens of a ``masked`` step, the last one given, or queue that choice where
        ``runs_ahead``. The words of ``allowed`` may be changed as soon as this returns.
        """
        raise AssertionError("this executable offers no late choice")

    def join(self, peers: Peers) -> None:  # noqa: B027 (some have nothing to exchange)
        """Meet the executables of the other ranks, before the first step; all ranks call it."""

    def told(self, step: Step) -> Step:
        """What the other ranks are told of a step that rank 0 is about to make: here, the step."""
        return step

    def follow(self, step: Step) -> None:
        """Make a follower's part of a step, of which nothing is read."""
        self.step(step)

    def follow_choice(self) -> None:  # noqa: B027 (most followers are told the tokens)
        """Make a follower's part of :meth:`choose`."""

    def check(self) -> None:  # noqa: B027 (most depend on nothing else)
        """Raise where something has gone that every later step needs, as a RankError."""

    @abstractmethod
    def reset(self) -> None:
        """Close every seat and forget every page, for a runtime that begins anew."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Make now, while nobody is seated, what a first step of each kind would wait for."""

    @property
    def is_prepared(self) -> bool:
        """Whether :meth:`prepare_next` has nothing left to prepare."""
        return True

    def prepare_next(self) -> None:  # noqa: B027
        """Prepare one kind of step that :meth:`prepare` leaves to idle time.

        Steps may run between two calls. A step of a kind that is not prepared prepares it.
        """

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Measure the bytes that weights and state hold now."""

    @abstractmethod
    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Bytes that this many positions of so many sequences need, all together."""

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release everything; the executable is not used again."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Passes that run together, and what must be true after them."""

    name: str
    passes: tuple[Pass, ...]
    verify: Callable[[GraphModule], None]


@dataclass(frozen=True, slots=True)
class Holding:
    """How a target keeps one weight: ``kind`` names the representation (``float32``, ``bfp8
    blocks``), ``num_bytes`` its size; ``order`` tells copies apart that differ in nothing else.
    """

    kind: str
    num_bytes: int
    order: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """A target's files in ``folder``; ``graph`` reads the lowered graph they were made of, and
    ``sketch``, sooner, the same with some number for every size that steps choose.
    """

    folder: Path
    contract: NumericContract
    graph: Callable[[], GraphModule]
    sketch: Callable[[], GraphModule]


@dataclass(frozen=True, slots=True)
class Emission:
    """A model that a target is to write in another form than a program.

    ``lower`` gives its graph after the stages it is told; ``constants`` the values of its buffers;
    ``write`` puts a file into ``folder``, or raises NoRoomError. ``settings``: what a kind may be
    told besides (see each target's).
    """

    lower: Callable[[Sequence[Stage]], GraphModule]
    get_weight: Callable[[str], Tensor]
    constants: Callable[[], dict[str, Tensor]]
    write: Callable[[str, bytes], None]
    folder: Path
    options: CompileOptions
    title: str
    progress: Progress
    settings: Mapping[str, Any]


class Target(ABC):
    """A kind of device: which passes prepare a graph for it, and how that becomes an executable.

    ``is_cached``: whether the cache keeps its programs, which cost far more to build than to load.
    ``is_emulated``: whether its executables have a device's numbers without the device, so that
    their speed says nothing of it. ``emits``: the kinds that a model can be written as for it; a
    program, which :meth:`load` runs, and those of :meth:`emit`. ``wire``: the format of partial
    sums between its ranks. ``reach_back``: positions that a layer with a window holds before it, if
    not all of a context. ``block_axis``: the only axis of weight blocks, if there is only one.
    """

    name: str
    is_cached: bool = False
    is_emulated: bool = False
    emits: tuple[str, ...] = ("program",)
    wire: str = "fp32"
    reach_back: int | None = None
    block_axis: str = ""

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline, from the traced graph to the one :meth:`compile` takes."""

    @abstractmethod
    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        """What this target makes of every format and fidelity in the graph."""

    def holding(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> Holding:
        """What :meth:`build` makes of one weight, without building: here, its format as packed.

        ``recipe``: the weight's, with its format. ``facts``: of the product or look-up that reads
        it; vectors and constants, which no tensor group names, have their own. A weight of two uses
        (tied embeddings) is asked for once a use; equal answers for equal recipes are one copy.
        ``block``: of experts, the other weights of their block, for targets that run it as one.

        Raises:
            CompileError: for a weight this target cannot hold.
        """
        assert recipe.format is not None
        axis = 0 if recipe.block_axis == "out" and len(recipe.shape) > 1 else -1
        return Holding(recipe.format, get_format(recipe.format).nbytes(recipe.shape, axis=axis))

    def state_holding(self, spec: StateSpec, *, compute: str) -> Holding:
        """What one piece of state takes, of a position or a sequence: here, as its format packs."""
        return Holding(spec.format, get_format(spec.format).nbytes(spec.shape))

    def settled(self, options: CompileOptions) -> Parallel:
        """The group of ranks asked for, and the wire that was named, else fp32 where arithmetic is
        exact, else this target's ``wire`` (ConfigError: for ranks where there can be but one).
        """
        check_ranks(self.name, options.parallel.tensor)
        own = "fp32" if options.compute == "exact" else self.wire
        return replace(options.parallel, wire=options.parallel.wire or own)

    def check_room(self, graph_module: GraphModule, options: CompileOptions) -> None:  # noqa: B027
        """Refuse what could not be loaded here, before any weight is read; here, nothing.

        Raises:
            CompileError: for caches that the memory has no room for, with what would fit.
        """

    def compile_ranks(
        self,
        graphs: Sequence[GraphModule],
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """All ranks of a group in one process, from their programs; for targets that can.

        Raises:
            CompileError: for a target that runs one rank a process.
        """
        raise CompileError(
            f"{len(graphs)} ranks in one process on target {self.name}; allowed: reference"
        )

    @abstractmethod
    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        """Stream the weights, one tensor at a time, into a program in ``folder``.

        The program serves contexts up to ``options.max_context``, in ``options.compute``; the
        batch and the threads are chosen when it is loaded.

        Raises:
            CompileError: for a graph this target cannot run, or a folder without room.
        """

    def check_emits(self, kind: str) -> None:
        """Refuse a kind that is not one of ``emits``.

        Raises:
            ConfigError: naming those that are.
        """
        if kind not in self.emits:
            raise ConfigError(f"target {self.name} emits no {kind!r}; {allowed(self.emits, kind)}")

    def emit(self, kind: str, emission: Emission) -> None:
        """Write a model as one of ``emits`` besides a program.

        Raises:
            ConfigError: for a kind that this target has not.
            CompileError: for a graph this target cannot write so.
        """
        self.check_emits(kind)
        raise NotImplementedError(f"{self.name}: {kind}")

    @abstractmethod
    def load(self, program: Program, options: CompileOptions, progress: Progress) -> Executable:
        """The executable of a program that :meth:`build` wrote.

        Raises:
            CheckpointError: for files that are not what :meth:`build` writes.
        """

    def compile(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """Build and load in one go, keeping nothing."""
        contract = self.contract(graph_module, options)
        try:
            temporary = TemporaryDirectory(prefix="tilewright-")
        except OSError as error:
            raise NoRoomError(
                f"no temporary folder ({error.strerror}); allowed: a TMPDIR that can be written"
            ) from None
        with temporary as name:
            folder = Path(name)
            self.build(graph_module, get_weight, folder, options, progress)
            program = Program(folder, contract, lambda: graph_module, lambda: graph_module)
            return self.load(program, options, progress)


__all__ = ["Capabilities", "CompileOptions", "Emission", "Executable", "Holding", "MemoryUse"]
__all__ += ["Program", "Progress", "Seat", "Stage", "Step", "StepOutput", "Target"]
