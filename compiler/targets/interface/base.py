"""The interface between the compiler and its targets: Target and Executable. Imports no torch."""

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
from tilewright.compiler.targets.interface.step import Slot, Step, StepOutput
from tilewright.compiler.targets.interface.token_masks import TokenMask
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import CompileError, ConfigError, NoRoomError, allowed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from tilewright.compiler.ir.info import NodeInfo
    from tilewright.compiler.ir.recipe import WeightRecipe
    from tilewright.compiler.passes.runner import Pass
    from tilewright.compiler.targets.image_encoder import AnyEncoder

Progress = Callable[[str, int, int], None]
"""Called with ``(step, done, total)`` during compilation."""


@dataclass(frozen=True, slots=True)
class LoweredLayer:
    """A draft layer for a target.

    Attributes:
        graph_module: The lowered graph.
        get_weight: Returns a tensor of the layer's checkpoint.
    """

    graph_module: GraphModule
    get_weight: Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """User options in addition to model, target and precision.

    Attributes:
        max_batch: Maximum sequence count with state.
        max_context: Maximum position count per sequence.
        compute: ``fast``, or ``exact`` for fp32 arithmetic everywhere. ``exact`` is not fast.
        num_threads: CPU thread count. None: selected by the target.
        memory_fraction: Share of the device's memory for this process. Sequences then share a pool
            of pages, and their full lengths may exceed it. None: every sequence has its full
            length.
        is_strict: Make each batch row's bits independent of concurrent requests and chunk sizes, at
            some cost. `Capabilities.invariant` is the effective level.
        copies: Dequantized weight copies for large batches: ``none``, ``codes`` (FP8), ``all`` or
            ``auto``. ``auto`` is ``all`` if every context still fits or 75 % of the pages remain,
            else without rounded copies, else ``codes``, for which a third of the pages and 33
            contexts suffice, else ``none``.
        max_step_tokens: Maximum prefill token count per step. Low memory reduces it.
        max_shared_tokens: Maximum prefill token count in a mixed batch. Low memory reduces it.
        parallel: The group of ranks.
        rank: This program's rank.
        least_batch: Minimum of ``max_batch``. The target selects the largest batch in this range
            for its memory. None: ``max_batch`` is fixed.
        strict_rows: Maximum open sequence count for strict steps, if ``is_strict`` is false.
            0: no step is strict.
        max_drafts: Draft tokens per slot and step for which buffers are reserved.
            `Capabilities.max_drafts` is the effective limit. Targets without buffers ignore it.
        tower_bytes: Device memory to reserve for a vision tower.
        draft_layer: The model's draft layer, for targets that load it with the model. None: no
            draft layer.
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
    parallel: ParallelConfig = SINGLE_RANK
    rank: int = 0
    least_batch: int | None = None
    strict_rows: int = 0
    max_drafts: int = 0
    tower_bytes: int = 0
    draft_layer: Any = None  # a `LoweredLayer`; ranks decode this class, so the type has no graph

    @property
    def max_strict_rows(self) -> int:
        """Return the maximum open sequence count for strict steps. 0: no step is strict."""
        return sys.maxsize if self.is_strict else self.strict_rows


class Executable(ABC):
    """A compiled model with its weights and state.

    Attributes:
        capabilities: Step limits.
        contract: Numeric contract.
        vocab_size: The logits' width.
        device_name: Device name in results (``H200``).
        device_detail: Further description, to distinguish devices with equal names. None: none.
        notes: Lines about the storage of weights and state.
        mesh: Devices in use, rows by columns.
        encoder: Vision tower. None: no images.
        num_tokens: Real token count, set before the first step. Larger ids have logits but are
            never sampled. None: all ids are tokens.
    """

    capabilities: Capabilities
    contract: NumericContract
    vocab_size: int
    device_name: str = "CPU"
    device_detail: str | None = None
    notes: tuple[str, ...] = ()
    mesh: str = "1x1"
    num_tokens: int | None = None
    encoder: AnyEncoder | None = None

    @property
    def num_choosable(self) -> int:
        """Return the number of leading logits that can be sampled."""
        return min(self.vocab_size, self.num_tokens or self.vocab_size)

    @property
    def image_value_bytes(self) -> int:
        """Return an image value's bytes."""
        return 4

    @property
    def cross_key_bytes(self) -> int:
        """Return the bytes of a key and value, over all cross layers. 0: embeddings."""
        width = 0 if self.encoder is None else self.encoder.cross_width
        return self.image_value_bytes * width

    @abstractmethod
    def step(self, step: Step) -> StepOutput:
        """Run a step, or queue it if ``runs_ahead``.

        An invalid step (a repeated slot, a gap in positions) is an internal error of the scheduler
        and fails an assertion. User input must be checked before.
        """

    def choose(self, output: StepOutput, allowed: TokenMask) -> None:
        """Sample the last step's tokens, a ``masked`` step, or queue the sampling if
        ``runs_ahead``.

        The caller may modify the words of ``allowed`` after this call.
        """
        raise AssertionError("this executable offers no late choice")

    def join(self, peers: SetupCollectives) -> None:  # noqa: B027 (some have nothing to exchange)
        """Connect to the executables of the other ranks. All ranks call it before the first
        step.
        """

    def step_for_followers(self, step: Step) -> Step:
        """Return the step to send to the followers. The default sends the step unchanged."""
        return step

    def follow(self, step: Step) -> None:
        """Run a step as a follower. The output is not read."""
        self.step(step)

    def follow_choice(self) -> None:  # noqa: B027 (most followers receive the tokens)
        """Run :meth:`choose` as a follower."""

    def emitted_counts(self) -> bytes:
        """Return the emitted tokens per slot of the last step with drafts, for followers without
        sampling. Empty: followers sample.
        """
        return b""

    def follow_counts(self, counts: bytes) -> None:  # noqa: B027 (CUDA followers sample)
        """Take :meth:`emitted_counts` of the leader."""

    def check(self) -> None:  # noqa: B027 (most depend on nothing else)
        """Raise RankError if a resource for all later steps is lost."""

    @abstractmethod
    def reset(self) -> None:
        """Close all slots and free all pages, for a new runtime."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Do the one-time work for all steps, such as captures. No sequence may be open."""

    @property
    def num_captures(self) -> int:
        """Return the number of captured graphs. A step with a capture has no typical time."""
        return 0

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Measure the current bytes of weights and state."""

    @abstractmethod
    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Return the state bytes for ``num_positions`` in total, over ``num_sequences``."""

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release all resources. No call may follow."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Passes with a common verification after them."""

    name: str
    passes: tuple[Pass, ...]
    verify: Callable[[GraphModule], None]


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """A target's storage of a weight.

    Attributes:
        kind: Representation (``float32``, ``bfp8 blocks``).
        num_bytes: Size in bytes.
        order: Layout, to distinguish copies with equal representation.
    """

    kind: str
    num_bytes: int
    order: str = ""


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """A target's files in a directory.

    Attributes:
        folder: The directory.
        contract: Numeric contract.
        graph: Reads the lowered graph.
        sketch: Reads the lowered graph with a fixed number for each dynamic size, which is faster.
    """

    folder: Path
    contract: NumericContract
    graph: Callable[[], GraphModule]
    sketch: Callable[[], GraphModule]


@dataclass(frozen=True, slots=True)
class Emission:
    """A model to write in another form than a program.

    Attributes:
        lower: Returns the graph after these stages.
        get_weight: Returns a checkpoint tensor by name.
        constants: Returns the buffer values by name.
        write: Writes a file into ``folder``. Raises NoRoomError.
        folder: Output directory.
        options: Compile options.
        title: Text for headings.
        progress: Progress callback.
        settings: Further options by name. Each target documents its own.
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
    """A device family: the passes for its graphs, and the path from a graph to an executable.

    Attributes:
        name: Name in options and results.
        is_cached: Store programs in the cache: building is much slower than loading.
        is_emulated: Executables emulate a device's numbers, so their speed is not the device's.
        emits: Output forms: a program for :meth:`load`, and the forms of :meth:`emit`.
        wire: Default link format for partial sums.
        reach_back: Retained positions before the window in windowed layers. None: the whole
            context.
        block_axis: The only supported axis of weight blocks. Empty: both.
        has_images: Executables take images in prompts.
        has_images_on_ranks: Executables of several ranks take images, too.
        has_cross_layers: Executables run cross-attention layers to images.
        has_bidirectional_images: Prompts have attention in both directions inside an image.
    """

    name: str
    is_cached: bool = False
    is_emulated: bool = False
    emits: tuple[str, ...] = ("program",)
    wire: str = "fp32"
    reach_back: int | None = None
    block_axis: str = ""
    has_images: bool = False
    has_images_on_ranks: bool = False
    has_cross_layers: bool = False
    has_bidirectional_images: bool = False

    def tower_device(self) -> str:
        """Return torch's name of the device for vision towers."""
        return "cpu"

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """Return the pipeline from the traced graph to the input of :meth:`compile`."""

    @abstractmethod
    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        """Return the target's implementation of each format and fidelity in the graph."""

    def weight_storage(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> WeightStorage:
        """Return a weight's storage by :meth:`build`, without building. The default is its
        packed format.

        A weight with two uses (tied embeddings) is queried once per use. Equal results for equal
        recipes share a copy.

        Args:
            recipe: The weight's recipe, with its format.
            facts: Metadata of the matmul or lookup. For vectors and constants, their own metadata.
            compute: ``fast`` or ``exact``.
            block: Other weights in the expert block, for targets that run the whole block as an op.

        Raises:
            CompileError: The target does not support the weight.
        """
        assert recipe.format is not None
        axis = 0 if recipe.block_axis == "out" and len(recipe.shape) > 1 else -1
        return WeightStorage(
            recipe.format, get_format(recipe.format).nbytes(recipe.shape, axis=axis)
        )

    def state_storage(self, spec: StateSpec, *, compute: str) -> WeightStorage:
        """Return the state storage for a position or a sequence. The default is its packed
        format.
        """
        if spec.value_format:
            formats = spec.format, spec.value_format
            half = (spec.shape[0] // 2, *spec.shape[1:])
            return WeightStorage(
                "/".join(formats), sum(get_format(f).nbytes(half) for f in formats)
            )
        return WeightStorage(spec.format, get_format(spec.format).nbytes(spec.shape))

    def settled(self, options: CompileOptions) -> ParallelConfig:
        """Return the group of ranks with a definite link format.

        An explicit format takes precedence. Otherwise exact arithmetic uses fp32, and fast
        arithmetic uses ``wire``.

        Raises:
            ConfigError: The target supports a single rank only.
        """
        check_ranks(self.name, options.parallel.tensor)
        own = "fp32" if options.compute == "exact" else self.wire
        return replace(options.parallel, wire=options.parallel.wire or own)

    def check_room(self, graph_module: GraphModule, options: CompileOptions) -> None:  # noqa: B027
        """Check the memory for this graph before weights are read. The default checks nothing.

        Raises:
            CompileError: The caches do not fit. The message has a size that fits.
        """

    def compile_ranks(
        self,
        graphs: Sequence[GraphModule],
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """Run all ranks of a group in one process, from their graphs.

        Raises:
            CompileError: The target needs a process per rank.
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
        """Stream the weights, a tensor at a time, into a program in ``folder``.

        The program serves contexts up to ``options.max_context`` with ``options.compute``. Batch
        and threads are selected at load.

        Raises:
            CompileError: The target does not support the graph, or the disk is full.
        """

    def check_emits(self, kind: str) -> None:
        """Reject a form outside ``emits``.

        Raises:
            ConfigError: The form is unknown. The message lists the known forms.
        """
        if kind not in self.emits:
            raise ConfigError(f"target {self.name} emits no {kind!r}; {allowed(self.emits, kind)}")

    def emit(self, kind: str, emission: Emission) -> None:
        """Write a model in a form other than a program.

        Raises:
            ConfigError: The form is unknown.
            CompileError: The target cannot write this graph.
        """
        self.check_emits(kind)
        raise NotImplementedError(f"{self.name}: {kind}")

    @abstractmethod
    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        """Return the executable for a program from :meth:`build`.

        Raises:
            CheckpointError: The files are invalid.
        """

    def compile(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """Build and load in a temporary directory."""
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
            program = BuiltProgram(folder, contract, lambda: graph_module, lambda: graph_module)
            return self.load(program, options, progress)


__all__ = ["Capabilities", "CompileOptions", "Emission", "Executable", "MemoryUse", "WeightStorage"]
__all__ += ["BuiltProgram", "Progress", "Slot", "Stage", "Step", "StepOutput", "Target"]
