"""The reference target: the oracle. It runs the eager references in fp32 on dequantized weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import INPUT, NodeInfo, info
from tilewright.compiler.ir.lazy import module_of
from tilewright.compiler.ir.recipe import WeightRecipe, load_values
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.compiler.ir.verify import head_of
from tilewright.compiler.passes.round_activations import ROUNDED, round_activations
from tilewright.compiler.targets.contract.build import build_contract
from tilewright.compiler.targets.contract.record import (
    EMULATED,
    HONOURED,
    NOT_HONOURED,
    Meaning,
    Meanings,
    NumericContract,
)
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable, with_all_rows
from tilewright.compiler.targets.host.tensor_files import save_tensors
from tilewright.compiler.targets.interface.base import (
    BuiltProgram,
    Capabilities,
    CompileOptions,
    Emission,
    Executable,
    MemoryUse,
    Progress,
    Slot,
    Stage,
    Target,
    WeightStorage,
)
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS
from tilewright.compiler.targets.interface.step import StateSnapshot
from tilewright.compiler.targets.pipeline import (
    MATCH,
    PRECISION,
    fuse,
    hidden_size,
    lower,
    vocab_size,
)
from tilewright.compiler.targets.ranks.collective_driver import run_together
from tilewright.compiler.targets.ranks.gathered_values import (
    RankInterpreter,
    SocketAllGather,
    has_collectives,
)
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import CheckpointError

aten = torch.ops.aten
_WEIGHTS = "weights.safetensors"
_NUM_SNAPSHOTS = 64
_FLOAT = Meaning(NOT_HONOURED, "fp32")

_MEANINGS = Meanings(
    weight=lambda name, axis: Meaning(
        HONOURED if name == "fp32" else EMULATED, f"{name} values in fp32, blocks along {axis}"
    ),
    fidelity=lambda name, axis, fidelity, phase: _FLOAT,
    attention=lambda fidelity, phase: _FLOAT,
    kv_cache=lambda name: _FLOAT,
    activation=lambda name: (
        Meaning(HONOURED, f"{name} into products") if name in ROUNDED else _FLOAT
    ),
    block_output=lambda name: Meaning(HONOURED, name),
)


class ReferenceTarget(Target):
    """A target without fusions, for correctness.

    Activations are fp32. With q80, inputs of matmuls or block outputs are rounded.
    """

    name = "reference"
    emits = ("program", "mlir")
    has_images = has_images_on_ranks = True
    has_cross_layers = True
    has_bidirectional_images = True

    def stages(self) -> tuple[Stage, ...]:
        return (MATCH, PRECISION, fuse(round_activations), lower())

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        return build_contract(graph_module, _MEANINGS)

    def weight_storage(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> WeightStorage:
        """Return float32 storage. Uses with equal recipes share a copy."""
        return WeightStorage("float32", 4 * math.prod(recipe.shape))

    def state_storage(self, spec: StateSpec, *, compute: str) -> WeightStorage:
        """Return float32 storage, regardless of the format."""
        return WeightStorage("float32", 4 * math.prod(spec.shape))

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        recipes = _recipes(graph_module)
        values = {}
        for done, recipe in enumerate(recipes):
            values[_key(done)] = load_values(recipe, get_weight)
            progress("weights", done + 1, len(recipes))
        save_tensors(values, folder / _WEIGHTS)

    def emit(self, kind: str, emission: Emission) -> None:
        """Write ``mlir``: the matched graph through torch-mlir. See `emit_mlir` for ``dialect`` and
        ``length``.
        """
        self.check_emits(kind)
        assert kind == "mlir"
        from tilewright.compiler.ir.mlir import emit_mlir

        graph_module, settings = emission.lower((MATCH,)), emission.settings
        constants, length = emission.constants(), settings["length"]
        emitted = emit_mlir(graph_module, settings["dialect"], length=length, constants=constants)
        emission.write("model.mlir", emitted.text.encode())
        emission.write("arguments.json", emitted.arguments_json().encode())

    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        graph_module, path = program.graph(), program.folder / _WEIGHTS
        recipes = _recipes(graph_module)
        try:
            values = load_file(path)
            stored = {recipe: values[_key(index)] for index, recipe in enumerate(recipes)}
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path}: not the weights of this graph: {error}") from None
        return ReferenceExecutable(graph_module, stored.__getitem__, options, program.contract)

    def compile(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """Load the values directly, without files of the same size."""
        recipes = _recipes(graph_module)
        values = {}
        for done, recipe in enumerate(recipes):
            values[recipe] = load_values(recipe, get_weight)
            progress("weights", done + 1, len(recipes))
        contract = self.contract(graph_module, options)
        return ReferenceExecutable(graph_module, values.__getitem__, options, contract)

    def compile_ranks(
        self,
        graphs: Sequence[GraphModule],
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        ranks = []
        for graph_module in graphs:
            executable = self.compile(graph_module, get_weight, options, progress)
            assert isinstance(executable, ReferenceExecutable)
            ranks.append(executable)
        return VirtualRanks(ranks)


def _recipes(graph_module: GraphModule) -> list[WeightRecipe]:
    """Return the graph's distinct recipes in input order."""
    found = [info(node).recipe for node in graph_module.graph.nodes if node.op == "placeholder"]
    return list(dict.fromkeys(recipe for recipe in found if recipe is not None))


def _key(index: int) -> str:
    return f"recipe_{index}"


class ReferenceExecutable(HostExecutable):
    """An executable with weights and caches in torch tensors. Slots index the caches' first
    axis.
    """

    verifies_in_turn = True

    def __init__(
        self,
        graph_module: GraphModule,
        get_values: Callable[[WeightRecipe], Tensor],
        options: CompileOptions,
        contract: NumericContract,
    ) -> None:
        super().__init__()
        self.contract = contract
        self.graph_module = graph_module
        self._inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        cross = [node for node in self._inputs if node.target == "cross_cache"]
        self._cross_width = int(cross[0].meta["val"].shape[1]) if cross else 0
        self._values: dict[str, Tensor] = {}
        self._states: list[tuple[StateSpec, Tensor]] = []
        for node in self._inputs:
            facts = info(node)
            if facts.recipe is not None:
                self._values[node.name] = get_values(facts.recipe)
            elif facts.state is not None:
                shape = (options.max_batch, *facts.state.shape)
                if facts.state.kind == PER_TOKEN:
                    kind, *rest = facts.state.shape
                    shape = (options.max_batch, kind, options.max_context, *rest)
                self._values[node.name] = torch.zeros(shape)
                self._states.append((facts.state, self._values[node.name]))
        weights = {id(tensor): tensor.nbytes for tensor in self._values.values()}
        self._weight_bytes = sum(weights.values()) - self.state_bytes(options.max_context)
        self.vocab_size = vocab_size(graph_module)
        self.capabilities = Capabilities(
            max_num_seqs=options.max_batch,
            max_context=options.max_context,
            max_prompts=options.max_batch,
            num_snapshots=_NUM_SNAPSHOTS if self._own_states() else 0,
            has_sequence_state=bool(self._own_states()),
            hidden_size=hidden_size(graph_module),
            max_drafts=0 if options.parallel.tensor > 1 else MAX_DRAFTS,
        )
        self._snapshots: dict[StateSnapshot, tuple[int, list[Tensor]]] = {}
        self._run: Callable[..., Tensor] = graph_module
        self._runs: dict[tuple[bool, bool, bool, bool], Callable[..., Tensor]] = {}
        self._exchange: SocketAllGather | None = None

    def join(self, peers: SetupCollectives) -> None:
        if has_collectives(self.graph_module):
            self._exchange = SocketAllGather.of(peers)
            self._run = RankInterpreter(self.graph_module, self._exchange).run

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    @torch.no_grad()
    def forward(self, batch: Batch) -> np.ndarray:
        result: Any = self._function(batch)(*self.arguments(batch))
        if self.keeps_hidden:
            result, hidden = result
            self.last_hidden = hidden.float().numpy()
        logits: Tensor = result.float()
        return logits.numpy()

    @torch.no_grad()
    def hidden(self, batch: Batch) -> np.ndarray:
        batch = with_all_rows(batch)
        run = self._function(batch, is_hidden=True)
        states: Tensor = run(*self.arguments(batch)).float()
        return states.numpy()

    def _function(self, batch: Batch, *, is_hidden: bool = False) -> Callable[..., Tensor]:
        """Return a batch's function: logits, hidden states or both, with or without images."""
        has_both = self.keeps_hidden and not is_hidden
        has_ends = batch.ends is not None
        key = is_hidden, batch.has_images, has_both, has_ends
        if not any(key):
            return self._run
        if key not in self._runs:
            graph_module = self.hidden_graph if is_hidden else self.graph_module
            graph_module = self.graph_with_hidden if has_both else graph_module
            if batch.has_images:
                graph_module = with_images(graph_module, has_ends=has_ends)
            run: Callable[..., Tensor] = graph_module
            if self._exchange is not None:
                run = RankInterpreter(graph_module, self._exchange).run
            self._runs[key] = run
        return self._runs[key]

    @functools.cached_property
    def hidden_graph(self) -> GraphModule:
        """Return the graph up to the output layer's input."""
        head, _ = head_of(self.graph_module)
        assert head is not None, "no product makes the logits"
        graph, copies = Graph(), dict[Node, Node]()
        graph.graph_copy(self.graph_module.graph, copies)
        graph.output(copies[head.all_input_nodes[0]])
        graph.eliminate_dead_code()
        return module_of(graph)

    @functools.cached_property
    def graph_with_hidden(self) -> GraphModule:
        """Return the graph with two results: logits, and hidden states of all tokens."""
        head, _ = head_of(self.graph_module)
        assert head is not None, "no product makes the logits"
        graph, copies = Graph(), dict[Node, Node]()
        logits = graph.graph_copy(self.graph_module.graph, copies)
        gathered = head.all_input_nodes[0]
        graph.output((logits, copies[gathered.all_input_nodes[0]]))
        return module_of(graph)

    def arguments(self, batch: Batch) -> list[Any]:
        """Return the graph's inputs for a step, in order."""
        step_values: dict[str, Any] = {
            "tokens": torch.from_numpy(batch.tokens),
            "positions": torch.from_numpy(batch.positions),
            "cu_seqlens": torch.from_numpy(batch.cu_seqlens),
            "slots": torch.tensor(batch.slots, dtype=torch.int64),
            "logit_rows": torch.from_numpy(batch.logit_rows),
        }
        if batch.hidden is not None:
            step_values["hidden"] = torch.from_numpy(batch.hidden)
        if self._cross_width:
            step_values |= self._cross_arguments(batch)
        arguments = [
            step_values[str(node.target)] if info(node).role == INPUT else self._values[node.name]
            for node in self._inputs
        ]
        if batch.has_images:
            arguments += self._image_arguments(batch)
        return arguments

    def _cross_arguments(self, batch: Batch) -> dict[str, Tensor]:
        """Return image rows and the visible rows per token, for cross-attention layers."""
        empty = np.empty((0, self._cross_width), np.float32)
        bounds = np.cumsum([0, *map(len, batch.cross_rows)])
        visible = batch.visible
        rows = np.zeros((len(batch.tokens), 2), np.int64) if visible is None else bounds[visible]
        return {
            "cross_cache": torch.from_numpy(np.concatenate([empty, *batch.cross_rows])),
            "visible": torch.from_numpy(rows),
        }

    def _image_arguments(self, batch: Batch) -> list[Tensor]:
        """Return the further inputs for `with_images`."""
        indices, rows, rotary = batch.image_tokens, batch.embeddings, batch.rotary
        if indices is None or rows is None:
            indices = np.empty(0, np.int64)
            rows = np.empty((0, self.capabilities.hidden_size), np.float32)
        if rotary is None:
            rotary = batch.positions[:, None]
        ends = () if batch.ends is None else (batch.ends,)
        return [torch.from_numpy(x) for x in (indices, rows, rotary, *ends)]

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        for spec, state in self._states:
            part = (slice(None), slice(num_positions)) if spec.kind == PER_TOKEN else ()
            state[target, *part] = state[source, *part]

    def save_state(self, slot: Slot, snapshot: StateSnapshot) -> None:
        self.keep_state(slot, snapshot, self.length(slot))

    def keep_state(self, slot: Slot, snapshot: StateSnapshot, position: int) -> None:
        """Copy a slot's per-sequence state at ``position`` to a snapshot."""
        kept = [state[slot].clone() for state in self._own_states()]
        self._snapshots[snapshot] = position, kept

    def load_state(self, slot: Slot, snapshot: StateSnapshot) -> int:
        position, kept = self._snapshots[snapshot]
        for state, values in zip(self._own_states(), kept, strict=True):
            state[slot] = values
        return position

    def _own_states(self) -> list[Tensor]:
        """Return the states with constant size per sequence."""
        return [state for spec, state in self._states if spec.kind == PER_SEQUENCE]

    def memory(self) -> MemoryUse:
        return MemoryUse(self._weight_bytes, self.state_bytes(self.capabilities.max_context))

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Return the bytes of all slots: the reference allocates them at full length."""
        return sum(state.nbytes for _, state in self._states)


def with_images(graph_module: GraphModule, *, has_ends: bool = False) -> GraphModule:
    """Return the graph with inputs for image embeddings and positions.

    ``embeddings [K, hidden]`` replace the token embeddings of ``image_tokens [K]``.
    ``rotary [T, pairs]`` are rotary positions. With ``has_ends``, ``ends [T]`` are the positions
    after the last visible position.
    """
    graph, copies = Graph(), dict[Node, Node]()
    output = graph.graph_copy(graph_module.graph, copies)
    graph.output(output)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        ends = graph.placeholder("ends") if has_ends else None
        rotary = graph.placeholder("rotary")
        embeddings = graph.placeholder("embeddings")
        indices = graph.placeholder("image_tokens")
    for node in list(graph.nodes):
        if node.target is ops.rope.overload:
            node.update_arg(1, rotary)
        elif ends is not None and node.target is ops.attention_step.overload:
            node.kwargs = {**node.kwargs, "ends": ends}
        elif node.target is ops.embedding.overload:
            with graph.inserting_after(node):
                mixed = graph.call_function(aten.index_copy.default)
            node.replace_all_uses_with(mixed)
            mixed.args = (node, 0, indices, embeddings)
    return module_of(graph)


class VirtualRanks(HostExecutable):
    """All ranks of a group in one process, as the oracle for a process per rank.

    Ranks advance together from collective to collective. Separate processes give equal bits.
    """

    verifies_in_turn = True

    def __init__(self, ranks: Sequence[ReferenceExecutable]) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        first = self.ranks[0]
        self.contract, self.capabilities = first.contract, first.capabilities
        self.vocab_size = first.vocab_size

    def forward(self, batch: Batch) -> np.ndarray:
        programs = [(rank.graph_module, rank.arguments(batch)) for rank in self.ranks]
        first, *others = run_together(programs)
        assert all(torch.equal(first, each) for each in others), "ranks hold different bits"
        logits: Tensor = first.float()
        return logits.numpy()

    def hidden(self, batch: Batch) -> np.ndarray:
        batch = with_all_rows(batch)
        found = run_together([(rank.hidden_graph, rank.arguments(batch)) for rank in self.ranks])
        states: Tensor = found[0].float()
        return states.numpy()

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        for rank in self.ranks:
            rank.copy_state(source, target, num_positions)

    def save_state(self, slot: Slot, snapshot: StateSnapshot) -> None:
        for rank in self.ranks:
            rank.keep_state(slot, snapshot, self.length(slot))

    def load_state(self, slot: Slot, snapshot: StateSnapshot) -> int:
        return {rank.load_state(slot, snapshot) for rank in self.ranks}.pop()

    def memory(self) -> MemoryUse:
        """Return the total memory of all ranks."""
        uses = [rank.memory() for rank in self.ranks]
        return MemoryUse(sum(use.weights for use in uses), sum(use.state for use in uses))

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return sum(rank.state_bytes(num_positions, num_sequences) for rank in self.ranks)
