"""Tiny random models, precisions and steps for compiler tests.

``TILEWRIGHT_UPDATE_GOLDENS=1 pytest ...`` writes golden texts again. Read the difference before a
commit.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from tilewright.compiler.driver import trace_model, weight_source
from tilewright.compiler.ir.info import INPUT, info
from tilewright.compiler.ir.recipe import load_dense, load_values
from tilewright.compiler.ir.state import PER_TOKEN
from tilewright.compiler.passes.runner import Pass, PassContext, PassReport, run_passes
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import (
    CompileOptions,
    Executable,
)
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    CopyState,
    OpenSlot,
    PrefillChunk,
    Slot,
    StateUpdate,
    Step,
    StepOutput,
)
from tilewright.compiler.targets.table import get_target
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.base import Rows, TensorMeta, inner_part, outer_rows
from tilewright.models.config import ModelConfig, RopeConfig
from tilewright.models.sources import stored_shapes
from tilewright.runtime.memory.pages import PagePool, pages_of

GOLDENS = Path(__file__).parent / "goldens"
UPDATE_VARIABLE = "TILEWRIGHT_UPDATE_GOLDENS"

QWEN2: dict[str, Any] = {"model_type": "qwen2", "attention_bias": True}
"""What makes a tiny configuration one of Qwen2; without it, it is one of Llama."""

_TENSOR_GROUPS = ("ff1_3", "ff2", "wqkv", "wo", "kv_cache", "lm_head", "embedding")
_OP_GROUPS = (
    *("li_ff1_3", "li_ff2", "li_qkv_decode", "li_o_decode", "sdpa_decode"),
    *("li_qkv_prefill", "li_o_prefill", "sdpa_prefill", "li_lm_head"),
)


class FakeCheckpoint:
    """Tensors in a dictionary.

    ``reads`` lists the requested names in order. ``num_bytes`` counts the read bytes.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.reads: list[str] = []
        self.num_bytes = 0

    @property
    def names(self) -> dict[str, TensorMeta]:
        return {
            name: TensorMeta(tuple(each.shape), "F32", each.nbytes)
            for name, each in self.tensors.items()
        }

    def stored_type(self, name: str) -> str:
        return "F32"

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        self.reads.append(name)
        outer = outer_rows(rows)
        found = self.tensors[name] if outer is None else self.tensors[name][outer]
        if isinstance(rows, tuple) or columns is not None:
            found = inner_part(found, rows, columns)
        self.num_bytes += found.nbytes
        return found


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped heads, tied embeddings, and an odd vocabulary size."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": 256,
        "norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "tie_embeddings": True,
    }
    changed = {**values, **changes}
    architecture = architecture_of(changed["model_type"])
    found = (architecture.config or ModelConfig)(**{**changed, **architecture.fixed, **changes})
    assert isinstance(found, ModelConfig)
    return found


def tiny_model(*, seed: int = 0, std: float = 0.05, **changes: Any) -> SimpleNamespace:
    """Return a loaded model for the compiler, with random weights from N(0, std)."""
    config = tiny_config(**changes)
    with torch.device("meta"):
        module: Any = architecture_of(config.model_type).model(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    sources = [source for parts in module.sources().values() for source in parts]
    offsets = {source.tensor: 1.0 - source.offset for source in sources}
    for name, shape in stored_shapes(module).items():
        values = torch.randn(shape, generator=generator) * std
        tensors[name] = offsets.get(name, 1.0) + values if "norm" in name else values
    return SimpleNamespace(
        name=config.name, config=config, module=module, checkpoint=FakeCheckpoint(tensors)
    )


def precision_of(
    weights: str = "fp32",
    fidelity: str = "hifi4",
    *,
    layers: str = "",
    block_axis: str = "in",
    **changes: str,
) -> PrecisionConfig:
    """Return a precision with a common format and fidelity, and ``changes`` by group.

    ``layers`` is the inside of a heading's ``layer_cfg = {...}``. kv_cache also has the format
    ``weights``, but bfp8 at most.
    """
    formats = dict.fromkeys(_TENSOR_GROUPS, weights) | {"activation": "mixed"}
    formats["router"] = weights if weights in ("fp32", "bf16", "fp16") else "bf16"
    fidelities = dict.fromkeys(_OP_GROUPS, fidelity)
    for key, value in changes.items():
        (fidelities if key.startswith(("li_", "sdpa_")) else formats)[key] = value
    heading = f"precision_cfg = {_map(formats)}, fidelity_cfg = {_map(fidelities)}"
    if layers:
        heading += f", layer_cfg = {{{layers}}}"
    return load_precision(f"{heading}, block_axis = {block_axis}")


def _map(settings: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in settings.items()) + "}"


def context_of(model: SimpleNamespace, precision: PrecisionConfig | None = None) -> PassContext:
    """Return a new pass context, by default fp32."""
    chosen = precision if precision is not None else precision_of()
    return PassContext(chosen.resolve(model.config.num_layers, model.name))


def pipeline(target: str = "cpu") -> list[Pass]:
    """Return all passes of a target in order, without verification."""
    return [current for stage in get_target(target).stages() for current in stage.passes]


def lowered(
    model: SimpleNamespace,
    *,
    until: str = "",
    target: str = "cpu",
    precision: PrecisionConfig | None = None,
) -> tuple[fx.GraphModule, PassContext]:
    """Return the traced graph after a target's passes, before the pass ``until``.

    Cached by configuration. Every call returns a copy.
    """
    ctx = context_of(model, precision)
    key = (model.config, target, until, ctx.precision.id)
    if key not in _LOWERED:
        passes = pipeline(target)
        names = [current.name for current in passes]
        assert not until or until in names, until
        end, first = names.index(until) if until else len(names), names.index("assign_precision")
        if end < first:
            graph_module, first = trace_model(model), 0
        else:
            graph_module = _matched(model, passes[:first], ctx)
        run_passes(graph_module, passes[first:end], ctx)
        _LOWERED[key] = graph_module, ctx
    graph_module, known = _LOWERED[key]
    return copy.deepcopy(graph_module), dataclasses.replace(
        known, notes=list(known.notes), reports=list(known.reports)
    )


_LOWERED: dict[tuple[object, ...], tuple[fx.GraphModule, PassContext]] = {}


def _matched(model: SimpleNamespace, passes: list[Pass], ctx: PassContext) -> fx.GraphModule:
    """Return a copy of the graph after the passes before precision.

    Cached. ``ctx`` receives their reports.
    """
    key = (model.config, *passes)
    if key not in _MATCHED:
        graph_module, own = trace_model(model), context_of(model)
        run_passes(graph_module, passes, own)
        _MATCHED[key] = graph_module, own.reports
    graph_module, reports = _MATCHED[key]
    ctx.reports.extend(reports)
    return copy.deepcopy(graph_module)


_MATCHED: dict[tuple[object, ...], tuple[fx.GraphModule, list[PassReport]]] = {}


def run_graph(graph_module: fx.GraphModule, model: SimpleNamespace, **inputs: Any) -> Any:
    """Run a graph eagerly on its recipes' values, with ``inputs`` by name.

    States are zeros for a slot with 32 positions.
    """
    graph_module.recompile()
    with torch.no_grad():
        return graph_module(*arguments_of(graph_module, model, inputs))


def arguments_of(
    graph_module: fx.GraphModule, model: SimpleNamespace, inputs: Mapping[str, Any]
) -> list[Any]:
    """Return the call arguments for `run_graph`."""
    get = weight_source(model)
    arguments = []
    for node in graph_module.graph.nodes:
        facts = info(node)
        if node.op != "placeholder":
            continue
        if facts.role == INPUT:
            arguments.append(inputs[str(node.target)])
        elif facts.recipe is not None:
            values = load_values if facts.recipe.format else load_dense
            arguments.append(values(facts.recipe, get))
        else:
            assert facts.state is not None
            kinds, *rest = facts.state.shape
            sizes = (kinds, 32, *rest) if facts.state.kind == PER_TOKEN else facts.state.shape
            arguments.append(torch.zeros(1, *sizes))
    return arguments


def step_inputs(num_tokens: int, *, vocab_size: int = 61, seed: int = 0) -> dict[str, Tensor]:
    """Return graph inputs for a sequence of random tokens, from position 0 in slot 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, vocab_size, (num_tokens,), generator=generator),
        "positions": torch.arange(num_tokens),
        "cu_seqlens": torch.tensor([0, num_tokens]),
        "slots": torch.tensor([0]),
        "logit_rows": torch.arange(num_tokens),
    }


def compiled(
    model: SimpleNamespace,
    target: str = "reference",
    *,
    precision: PrecisionConfig | None = None,
    **options: Any,
) -> Executable:
    """Return an executable from a cached trace (tests/test_driver.py compares).

    Defaults: four sequences with 64 positions, float arithmetic, a single thread.
    """
    defaults = CompileOptions(max_batch=4, max_context=64, compute="exact", num_threads=1)
    graph_module, _ = lowered(model, target=target, precision=precision)
    chosen = dataclasses.replace(defaults, **options)
    return get_target(target).compile(
        graph_module,
        weight_source(model, chosen.max_context),
        chosen,
        lambda what, done, total: None,
    )


class _Slots:
    """Open slots on an executable in manual steps."""

    def __init__(self, executable: Executable) -> None:
        self.free = list(range(executable.capabilities.max_num_seqs))
        self.pool = PagePool(executable.capabilities.num_pages)
        self.pages: dict[Slot, list[int]] = {}


_SLOTS: WeakKeyDictionary[Executable, _Slots] = WeakKeyDictionary()


def take_slot(
    executable: Executable, num_positions: int = 0, choosing: SamplingParams | None = None
) -> Slot:
    """Open the lowest free slot, with pages for these positions (0: a whole context)."""
    limits, slots = executable.capabilities, _SLOTS.setdefault(executable, _Slots(executable))
    slot = Slot(heapq.heappop(slots.free))
    edits: list[StateUpdate] = [OpenSlot(slot, choosing or SamplingParams())]
    if limits.page_size:
        count = pages_of(num_positions or limits.max_context, limits.page_size)
        slots.pages[slot] = slots.pool.take(count)
        edits.append(AssignPages(slot, 0, tuple(slots.pages[slot])))
    executable.step(Step(edits=tuple(edits)))
    return slot


def leave_slot(executable: Executable, slot: Slot) -> None:
    """Close a slot and free its pages."""
    executable.step(Step(edits=(CloseSlot(slot),)))
    slots = _SLOTS[executable]
    slots.pool.release(slots.pages.pop(slot, []))
    heapq.heappush(slots.free, slot)


def copy_slot(executable: Executable, slot: Slot, num_positions: int) -> Slot:
    """Copy a slot's first positions to a new slot. Whole pages are shared."""
    fresh = take_slot(executable)
    slots, size = _SLOTS[executable], executable.capabilities.page_size
    edits: list[StateUpdate] = []
    if size and (whole := slots.pages[slot][: num_positions // size]):
        slots.pool.hold(whole)
        slots.pool.release(slots.pages[fresh][: len(whole)])
        slots.pages[fresh][: len(whole)] = whole
        edits.append(AssignPages(fresh, 0, tuple(slots.pages[fresh])))
    executable.step(Step(edits=(*edits, CopyState(slot, fresh, num_positions))))
    return fresh


def step(
    executable: Executable,
    work: Sequence[tuple[Slot, Sequence[int], int]],
    *,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Run a step for entries (slot, tokens, first position) and return logits, by default of last
    rows. Single tokens after a prefix are decode rows. All other entries are prefill chunks.
    """
    if rows is None and all(len(tokens) == 1 and start for _, tokens, start in work):
        forced = {slot: tokens[0] for slot, tokens, _ in work}
        given = Step(decode=tuple(forced), forced=forced, want_logits=True)
        return joined(executable.step(given))
    found = []
    for slot, tokens, start in work:
        chunk = PrefillChunk(slot, start, tuple(tokens), chooses=rows is None, echoes=bool(rows))
        output = executable.step(Step(prompts=(chunk,), want_logits=True))
        found.append(joined(output) if output.parts else torch.empty(0, executable.vocab_size))
    logits = torch.cat(found)
    return logits[list(rows)] if rows else logits


def joined(output: StepOutput) -> Tensor:
    """Return the logits of a step in order."""
    return torch.cat([part.logits() for part in output.parts if part.logits is not None])


def prefill(executable: Executable, tokens: Sequence[int], chunks: Iterable[int] = ()) -> Tensor:
    """Prefill a new sequence in chunks with these sizes. Return all logits and close the slot."""
    slot = take_slot(executable, len(tokens))
    parts, start = [], 0
    for size in [*chunks, len(tokens)]:
        part = tokens[start : start + size]
        if len(part) == 1 and start:
            parts.append(step(executable, [(slot, part, start)]))
        elif part:
            parts.append(step(executable, [(slot, part, start)], rows=range(len(part))))
        start += len(part)
    leave_slot(executable, slot)
    return torch.cat(parts)


def random_tokens(count: int, *, vocab_size: int = 61, seed: int = 0) -> list[int]:
    """Return token ids from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def check_golden(name: str, text: str) -> None:
    """Compare with ``tests/goldens/<name>``, or write it if the variable above is set."""
    path = GOLDENS / name
    if os.environ.get(UPDATE_VARIABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no golden {name}; write it with {UPDATE_VARIABLE}=1"
    assert text == path.read_text(encoding="utf-8")
