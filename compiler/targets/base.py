"""The narrow waist: what a step takes and gives, what a target is, what an executable promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NewType

import torch
from torch import Tensor
from torch.fx import GraphModule

from compiler.errors import ConfigError, NoRoomError, allowed
from compiler.formats import get_format
from compiler.ops import SamplingBatch, sample
from compiler.ops.sample import likeliest
from compiler.passes.runner import Pass
from compiler.targets.contract import NumericContract

StateHandle = NewType("StateHandle", int)
"""Names one sequence's state inside an executable, which alone knows where it is kept."""

Progress = Callable[[str, int, int], None]
"""Told ``(what, done, total)`` while a model is compiled."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """Work of one step: T tokens of N sequences, flat, sequence after sequence.

    ``tokens [T]`` and ``positions [T]`` int64 (positions of a sequence are consecutive and follow
    what its state holds); ``cu_seqlens [N + 1]`` cuts them into sequences; ``logit_rows [R]``
    names the tokens whose logits are wanted; ``states``: one handle a sequence, all different.
    ``sampling``: one row per logit row, None when no token is to be chosen.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    logit_rows: Tensor
    states: tuple[StateHandle, ...]
    sampling: SamplingBatch | None = None
    want_logits: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.states)

    def following(self, token_ids: Tensor) -> StepInput:
        """The decode step after this one of the same sequences: the tokens just chosen, one
        position on. What stays the same is the same object, which targets may look for.
        """
        sampling = self.sampling
        if sampling is not None:
            sampling = replace(sampling, positions=sampling.positions + 1)
        return replace(self, tokens=token_ids, positions=self.positions + 1, sampling=sampling)

    @property
    def sequence_index(self) -> Tensor:
        """Which sequence each token belongs to: ``[T]``."""
        lengths = self.cu_seqlens.diff()
        return torch.repeat_interleave(torch.arange(self.num_sequences), lengths)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """``token_ids [R]`` and ``finished [R]`` (an end token was chosen) on the device, where
    sampling was asked for; ``logits [R, vocab]`` float32 where they were.
    """

    token_ids: Tensor | None = None
    finished: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executable's steps may look like; schedulers respect it.

    ``max_batch``: sequences with state at a time. ``max_context``: positions of a sequence.
    ``max_prefill_sequences``: in one prefill step. ``mixed_steps``: prefill and decode rows in one
    step. ``paged``: state grows page by page. ``buckets``: batch sizes that were captured.
    """

    max_batch: int
    max_context: int
    max_prefill_sequences: int
    mixed_steps: bool
    paged: bool = False
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes an executable holds: weights as the target keeps them, and the whole state."""

    weights: int
    state: int


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a user may choose besides model, target and precision.

    ``compute``: ``fast``, or ``exact`` for float arithmetic everywhere (no speed is claimed).
    """

    max_batch: int = 1
    max_context: int = 2048
    compute: str = "fast"
    num_threads: int | None = None


class Executable(ABC):
    """A compiled model with its weights and state."""

    capabilities: Capabilities
    contract: NumericContract
    vocab_size: int

    @abstractmethod
    def step(self, inputs: StepInput) -> StepOutput:
        """Run one step; the states of its sequences then hold its tokens as well."""

    @abstractmethod
    def reserve(self, num_positions: int) -> StateHandle:
        """State for a sequence of up to ``num_positions``.

        Raises:
            RequestError: when it is longer than the context, or nothing is free.
        """

    @abstractmethod
    def free(self, handle: StateHandle) -> None:
        """Give a sequence's state, and its memory, back."""

    @abstractmethod
    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        """A new sequence with the first ``num_positions`` of this one's history.

        Also how a state is kept to be returned to (a snapshot): a copy nobody steps.
        """

    @abstractmethod
    def num_free(self) -> int:
        """How many more sequences can be reserved now."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """What is held now."""

    @abstractmethod
    def state_bytes(self, num_positions: int) -> int:
        """Bytes that this many positions need, of whatever sequences."""

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
    blocks``), ``num_bytes`` its size.
    """

    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Program:
    """A target's files in ``folder``; ``graph`` reads the lowered graph they were made of."""

    folder: Path
    contract: NumericContract
    graph: Callable[[], GraphModule]


class Target(ABC):
    """A kind of device: which passes prepare a graph for it, and how that becomes an executable.

    ``is_cached``: whether building a program is so much more work than loading it that the cache
    keeps programs of this target.
    """

    name: str
    is_cached: bool = False

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline, from the traced graph to the one :meth:`compile` takes."""

    @abstractmethod
    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        """What this target makes of every format and fidelity in the graph."""

    def holding(
        self,
        shape: tuple[int, ...],
        format: str,
        *,
        block_axis: str,
        group: str,
        compute: str,
        fidelities: tuple[str, str],
    ) -> Holding:
        """What :meth:`build` makes of one weight, without building: here, the format as packed.

        ``shape``: rows (out) first. ``group``: the tensor group, empty for what has none (norms,
        biases). ``fidelities``: of its products, in prefill and in decode. A weight of two uses
        (tied embeddings) is asked for once a use, since each may have its own format.

        Raises:
            CompileError: for a weight this target cannot hold.
        """
        axis = 0 if block_axis == "out" and len(shape) > 1 else -1
        return Holding(format, get_format(format).nbytes(shape, axis=axis))

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
            return self.load(Program(folder, contract, lambda: graph_module), options, progress)


_TARGETS = {
    "reference": ("compiler.targets.reference", "ReferenceTarget"),
    "null": ("compiler.targets.null", "NullTarget"),
    "cpu": ("compiler.targets.cpu", "CpuTarget"),
}


def target_names() -> tuple[str, ...]:
    """The targets there are."""
    return tuple(_TARGETS)


def get_target(name: str) -> Target:
    """The target of this name; its libraries are imported only now.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in _TARGETS:
        raise ConfigError(f"unknown target {name!r}; {allowed(_TARGETS)}")
    module, class_name = _TARGETS[name]
    found = getattr(import_module(module), class_name)()
    assert isinstance(found, Target)
    return found


def vocab_size(graph_module: GraphModule) -> int:
    """How many logits a row of the graph's result has."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    return int(output.args[0].meta["val"].shape[-1])


def finish_step(logits: Tensor, inputs: StepInput) -> StepOutput:
    """The end of a step where tokens are chosen on the host: ``logits [R, vocab]`` float32."""
    batch = inputs.sampling
    token_ids = finished = None
    if batch is not None and batch.is_greedy:
        token_ids = likeliest(logits)
    elif batch is not None:
        token_ids = sample.reference(
            logits, batch.temperature, batch.top_k, batch.top_p, batch.seeds, batch.positions
        )
    if batch is not None and token_ids is not None:
        finished = (token_ids.unsqueeze(-1) == batch.end_tokens).any(-1)
    return StepOutput(token_ids, finished, logits if inputs.want_logits else None)


__all__ = [
    "Capabilities",
    "CompileOptions",
    "Executable",
    "Holding",
    "MemoryUse",
    "Program",
    "Progress",
    "Stage",
    "StateHandle",
    "StepInput",
    "StepOutput",
    "Target",
    "finish_step",
    "get_target",
    "target_names",
    "vocab_size",
]
