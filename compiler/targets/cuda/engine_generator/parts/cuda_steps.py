"""The plan on a GPU: kernels in CUDA graphs, one graph per size of step."""

from __future__ import annotations

import ctypes
import gc
import math
from array import array
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import CHOICES
from tilewright.compiler.targets.cuda.engine_generator.parts.kernels import power
from tilewright.compiler.targets.cuda.engine_generator.parts.launches import (
    BLOCK,
    LIBRARY,
    WAYS,
    CudaKernels,
    Tokens,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_kernels import (
    convolve_token_kernel,
    delta_kernel,
    expert_product_kernel,
    expert_sum_kernel,
    gate_kernel,
    norm_heads_kernel,
    order_kernel,
    route_kernel,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.pages import (
    PAGE,
    SPARE_PAGES,
    Pages,
    Rows,
    call,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Linear
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    LENGTH_EPS,
    EngineError,
    HybridSettings,
    Settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import (
    Bound,
    BoundMixer,
    MixedExecutor,
    Values,
)

MOST_TOKENS, MOST_PROMPTS = 8192, 16
"""Maximum prompt tokens and prompts per step. A longer prompt has its own step."""

SPLIT_FROM = 512
"""Minimum positions for split decode attention."""

QUERIES = 16, 32, 64
"""Prompt tokens per attention program, as compiled."""

NUM_SLOTS = 16
"""Initial slots with memory, and the increment."""

IN_FLIGHT, MESSAGE = 32, 8192
"""Maximum pending copies to the device, and maximum numbers per copy."""


@dataclass
class CudaSequence:
    """``slot``: row in the page table."""

    slot: int
    pages: list[int]
    length: int


@dataclass(frozen=True)
class Captured:
    """A graph with its input tensor and its result."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    value: Tensor


def shown(tensor: Tensor) -> Tensor:
    """Return a tensor without ownership, because graphs of a pool share memory."""
    place = {"data": (tensor.data_ptr(), False), "typestr": "|u1", "version": 3}
    view = SimpleNamespace(__cuda_array_interface__={"shape": (tensor.nbytes,), **place})
    return torch.as_tensor(view, device=tensor.device).view(tensor.dtype).view(tensor.shape)


@cache
def side_stream(device: torch.device) -> Any:
    """Return the process's stream for captures. Torch would create 128 streams with memory."""
    found = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(found), 1)
    return torch.cuda.ExternalStream(found.value, device=device)


class CudaExecutor(CudaKernels):
    """Sequences in pages. Steps are padded to captured sizes.

    ``prompt_sizes``: prefill graph sizes in tokens.
    """

    prompt_sizes: tuple[int, ...] = CHOICES.prompts

    def __init__(
        self, tensors: dict[str, Tensor], settings: Settings, device: torch.device
    ) -> None:
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            raise EngineError(f"device '{device}'; GPUs that torch finds here: {count}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            super().__init__(tensors, settings, device)
            self.pages = Pages(settings, device)
            self._make_slots()
            self._graphs: dict[tuple[str, int, int], Captured] = {}
            if device.type == "cuda":
                self._prepare()

    def _prepare(self) -> None:
        """Compile kernels and capture graphs, largest first, so that memory is shared."""
        slots = torch.empty(IN_FLIGHT, MESSAGE, dtype=torch.int64, pin_memory=True)
        self._messages = cycle([(slot, torch.cuda.Event()) for slot in slots])
        self._graph_memory = torch.cuda.graph_pool_handle()
        gc.collect()  # objects must not be freed during captures
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(side_stream(self.device)):
            for rows in CHOICES.batches:
                self._time_products(rows)
            for queries in QUERIES if self.prompt_sizes else ():
                self._run_prompts(self._inputs("prompts", self._rows_of(queries)), 1)
            for size in reversed(self.prompt_sizes):
                self._captured("prompts", size, 1)
            for rows in reversed(CHOICES.batches):
                for splits in {1, self._splits(rows, self.settings.max_positions)}:
                    self._captured("decode", rows, splits)
            for each in self._graphs.values():
                each.graph.replay()  # the first replay takes longer
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def rehearsals(self) -> Iterable[tuple[int, int]]:
        """Return the calls that fit a new engine."""
        most, room = self.settings.max_positions - 2, self.pages.size
        calls = [(n, min(size // n, most)) for size in self.trial_sizes() for n in CHOICES.batches]
        return [(n, k) for n, k in calls if 0 < k < (room // n - 1 - SPARE_PAGES) * PAGE]

    def trial_sizes(self) -> Iterable[int]:
        """Return prompt sizes for a trial, one per graph."""
        return self.prompt_sizes

    def _rows_of(self, queries: int) -> int:
        """Return the minimum prompt tokens for ``queries`` tokens per program."""
        return queries * -(-self.num_processors // self.settings.num_heads)

    def _time_products(self, rows: int) -> None:
        """Select each matmul by a decode step's time with ``rows`` rows."""
        products = [each for each in self.program if isinstance(each.does, Linear)]
        for shape, each in {self._shape(each, rows): each for each in products}.items():
            ways = self.ways(each, rows)
            if shape in WAYS or len(ways) == 1:
                continue
            times = {}
            for way in ways:
                if self._is_right(way, each, rows):
                    WAYS[shape] = way
                    times[way] = self._step_time(rows)
            WAYS[shape] = min(times, key=lambda way: times[way])

    def _is_right(self, way: str, each: Bound, rows: int) -> bool:
        """Return whether a matmul agrees with the library on random rows."""
        weight, does = each.weight, each.does
        assert weight is not None
        x = torch.randn(rows, weight.shape[1], device=self.device).to(weight.dtype)
        expected, ours = (
            self.product_by(
                each_way, each, x, x.new_zeros(rows, len(weight)) if does.residual else None
            )
            for each_way in (LIBRARY, way)
        )
        return bool((ours - expected).abs().max() <= 0.02 * expected.abs().max())

    def _step_time(self, rows: int) -> float:
        """Return milliseconds of some decode steps with the selected matmuls."""
        graph = self._capture("decode", rows, 1).graph
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for index in range(7):
            if index == 2:
                begin.record()
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    # Prompts: complete, from position 0, concatenated in a step.

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[list[CudaSequence], Tensor]:
        with self._here():
            return self._prefill(prompts)

    def _prefill(self, prompts: Sequence[Tensor]) -> tuple[list[CudaSequence], Tensor]:
        sequences: list[CudaSequence] = []
        try:
            for prompt in prompts:
                sequences.append(self._open(len(prompt)))
            logits, first = [], 0
            for stop in _cuts([len(prompt) for prompt in prompts]):
                logits.append(self._prompts(sequences[first:stop], prompts[first:stop]))
                first = stop
            self._upload_pages(sequences)  # for later steps, while the device computes
        except Exception:
            self.release(*sequences)
            raise
        return sequences, logits[0] if len(logits) == 1 else torch.cat(logits)

    def _prompts(self, sequences: Sequence[CudaSequence], prompts: Sequence[Tensor]) -> Tensor:
        count = sum(len(prompt) for prompt in prompts)
        size = next((size for size in self.prompt_sizes if size >= count), count)
        is_here = all(prompt.device.type == "cpu" for prompt in prompts)
        staged = self._staged(sequences, prompts if is_here else [], size)
        found = self._graphs.get(("prompts", size, 1))
        inputs = self._send(staged, None if found is None else found.inputs)
        if not is_here:
            torch.cat([each.to(self.device) for each in prompts], out=inputs[0, :count])
        if found is None:
            return self._run_prompts(inputs, len(prompts))
        return self._replay(found)[: len(prompts)].clone()

    def _run_prompts(self, inputs: Tensor, count: int) -> Tensor:
        tokens, starts, places, lasts = inputs
        batch = Tokens(tokens, starts=starts, places=places, lasts=lasts[:count])
        return self.run(self.program, {}, batch)["logits"]

    def _staged(
        self, sequences: Sequence[CudaSequence], prompts: Sequence[Tensor], size: int
    ) -> Tensor:
        """Return a prefill step's ``[4, size]``: tokens, starts, places, and last rows.

        The standard library's arrays are faster on the host than many small tensors.
        """
        tokens, starts, places, lasts = array("q"), array("q"), array("q"), array("q")
        for prompt in prompts:
            tokens.extend(prompt.tolist())
        width = self.settings.head_dim
        for each in sequences:
            starts.extend([len(starts)] * each.length)
            for page in each.pages:
                first = page * self.pages.page_size
                places.extend(range(first, first + PAGE * width, width))
            del places[len(starts) :]
            lasts.append(len(starts) - 1)
        starts.extend(range(len(starts), size))
        places.extend([-1] * (size - len(places)))
        for part in (tokens, lasts):
            part.extend([0] * (size - len(part)))
        return torch.frombuffer(tokens + starts + places + lasts, dtype=torch.int64).view(4, size)

    # Decode: a token per sequence.

    def decode(self, sequences: Sequence[CudaSequence], tokens: Tensor) -> Tensor:
        with self._here():
            grown = [each for each in sequences if each.length == len(each.pages) * PAGE]
            for each in grown:
                each.pages += self.pages.take(1)
            if grown:
                self._upload_pages(grown, only_last=True)
            most = CHOICES.batches[-1]
            firsts = range(0, len(sequences), most)
            found = [self._decode(sequences[i : i + most], tokens[i : i + most]) for i in firsts]
            return found[0] if len(found) == 1 else torch.cat(found)

    def _decode(self, sequences: Sequence[CudaSequence], tokens: Tensor) -> Tensor:
        count, longest = len(sequences), max(each.length for each in sequences)
        size = next(size for size in CHOICES.batches if size >= count)
        found = self._captured("decode", size, self._splits(size, longest))
        padding = [0] * (size - count)
        positions = [*(each.length for each in sequences), *([-1] * (size - count))]
        slots = [*(each.slot for each in sequences), *padding]
        is_here = tokens.device.type == "cpu"
        ids = [*tokens.tolist(), *padding] if is_here else [0] * size
        self._send(torch.tensor([ids, positions, slots]), found.inputs)
        if not is_here:
            found.inputs[0, :count].copy_(tokens)
        logits = self._replay(found)[:count].clone()
        for each in sequences:
            each.length += 1
        return logits

    def _run_decode(self, inputs: Tensor, splits: int) -> Tensor:
        tokens, positions, slots = inputs
        batch = Tokens(tokens, positions=positions, slots=slots, table=self._table, splits=splits)
        return self.run(self.program, {}, batch)["logits"]

    def _splits(self, rows: int, longest: int) -> int:
        """Return parts of decode attention that fill the device, if the work suffices."""
        if longest < SPLIT_FROM:
            return 1
        wanted = 2 * self.num_processors // (rows * self.settings.num_kv_heads)
        return max(1, min(32, 1 << max(0, wanted).bit_length() >> 1))

    # Graphs.

    def _captured(self, kind: str, size: int, splits: int) -> Captured:
        """Return the graph for a size."""
        key = kind, size, splits
        if key not in self._graphs:
            self._graphs[key] = self._capture(kind, size, splits, self._graph_memory)
        return self._graphs[key]

    def _inputs(self, kind: str, size: int) -> Tensor:
        """Return a graph's input tensor with padding."""
        inputs = torch.zeros(3 if kind == "decode" else 4, size, dtype=torch.int64)
        if kind == "decode":
            inputs[1] = -1
        else:
            inputs[1], inputs[2] = torch.arange(size), -1
        return inputs.to(self.device)

    def _capture(self, kind: str, size: int, splits: int, *pool: Any) -> Captured:
        """Capture a step. ``pool``: shared memory of graphs with the engine's lifetime."""
        inputs = self._inputs(kind, size)

        def step() -> Tensor:
            if kind == "decode":
                return self._run_decode(inputs, splits)
            return self._run_prompts(inputs, MOST_PROMPTS)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side_stream(self.device)):
            step()  # compiles new kernels
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # frees memory of graphs that were timed only
            graph.capture_begin(*pool)
            try:
                value = step()
            finally:
                graph.capture_end()
        return Captured(graph, inputs, shown(value))

    def _replay(self, found: Captured) -> Tensor:
        found.graph.replay()
        return found.value

    def _here(self) -> Any:
        """Select the engine's device, because kernels launch on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # Slots and pages.

    def _make_slots(self, state_bytes: int = 0) -> None:
        """Create the page table. ``state_bytes``: additional memory per slot."""
        width = -(-self.settings.max_positions // PAGE)
        self._slots = Rows(NUM_SLOTS, NUM_SLOTS, 8 * width + state_bytes, self.device)
        self._table = self._slots.tensor((width,), torch.int64)

    def _open(self, length: int) -> CudaSequence:
        (slot,) = self._slots.take(1)
        try:
            spare = SPARE_PAGES * self._slots.num_taken
            return CudaSequence(slot, self.pages.take(-(-length // PAGE), spare), length)
        except torch.OutOfMemoryError:
            self._slots.give([slot])
            raise

    def release(self, *sequences: CudaSequence) -> None:
        with self._here():
            for each in sequences:
                self.pages.give(each.pages)
                self._slots.give([each.slot])

    def _upload_pages(self, sequences: Sequence[CudaSequence], only_last: bool = False) -> None:
        """Write the page numbers of sequences to the table."""
        at, places, width = array("q"), array("q"), self._table.shape[1]
        for each in sequences:
            first = len(each.pages) - 1 if only_last else 0
            at.extend(range(each.slot * width + first, each.slot * width + len(each.pages)))
            places.extend(page * self.pages.page_size for page in each.pages[first:])
        found = self._send(torch.frombuffer(at + places, dtype=torch.int64).view(2, -1))
        self._table.view(-1).index_copy_(0, *found)

    def _send(self, values: Tensor, to: Tensor | None = None) -> Tensor:
        """Copy host numbers to the device without waiting."""
        if to is None:
            to = torch.empty_like(values, device=self.device)
        if self.device.type != "cuda" or values.numel() > MESSAGE:
            return to.copy_(values)
        slot, event = next(self._messages)
        event.synchronize()
        view = slot[: values.numel()].view(values.shape)
        to.copy_(view.copy_(values), non_blocking=True)
        event.record()
        return to


def _cuts(lengths: Sequence[int]) -> list[int]:
    """Return cuts of a list of prompts into steps within the limits."""
    cuts, total, first = [], 0, 0
    for index, length in enumerate(lengths):
        if total and (total + length > MOST_TOKENS or index - first == MOST_PROMPTS):
            cuts.append(index)
            total, first = 0, index
        total += length
    return [*cuts, len(lengths)]


MAX_SMALL_PAIRS = 64
"""Maximum row-expert pairs with separate reads of expert weights."""

WARMING, MOST_WARMING = (1, 12, 200, 1100), 2048
"""Prompt tokens of compiling runs, and the maximum of others."""


class HybridCudaExecutor(MixedExecutor, CudaExecutor):
    """Linear attention state in float32, and uncaptured prompts with any sequence count.

    ``windows [slots, linear layers, channels, taps - 1]`` and ``memories [slots, linear layers,
    heads, K, V]``.
    """

    settings: HybridSettings
    prompt_sizes = ()
    _spans: Tensor

    def trial_sizes(self) -> Iterable[int]:
        return (*WARMING, *(min(self._rows_of(each), MOST_WARMING) for each in QUERIES))

    def _make_slots(self, state_bytes: int = 0) -> None:
        s = self.settings
        window = s.num_linear, s.mixed_width, s.taps - 1
        memory = s.num_linear, s.value_heads, s.key_dim, s.value_dim
        super()._make_slots(4 * (math.prod(window) + math.prod(memory)))
        self._windows = self._slots.tensor(window, torch.float32)
        self._memories = self._slots.tensor(memory, torch.float32)

    def _prompts(self, sequences: Sequence[CudaSequence], prompts: Sequence[Tensor]) -> Tensor:
        counts = [len(prompt) for prompt in prompts]
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        slots = [each.slot for each in sequences]
        self._spans = self._send(torch.tensor([firsts, counts, slots]))
        return super()._prompts(sequences, prompts)

    def gated_attend(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        x = values[each.does.x]
        s, width = self.settings, x.shape[1]
        qkv = x.new_empty(len(x), s.qkv_heads * s.head_dim)
        norms = each.tensors["q_norm"], each.tensors["k_norm"]
        given = qkv, x, *norms, width, s.eps
        self.launch(norm_heads_kernel, (len(x), s.qkv_heads), *given, **self._heads())
        heads = self.attended(each, qkv, batch)
        out, size = torch.empty_like(heads), heads.shape[1]
        grid = len(x), -(-size // BLOCK)
        gates = x[:, width - size :]
        self.launch(gate_kernel, grid, out, heads, gates, size, width, BLOCK=BLOCK)
        return out

    def delta_rule(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        x = values[each.does.x]
        s, place = self.settings, self.settings.place_of(each.layer)
        if batch.starts is None:
            mixed = self._convolve_tokens(each, x, batch, place)
            positions, slots = batch.positions, batch.slots
            assert positions is not None and slots is not None
            firsts = counts = positions
        else:
            mixed = self._convolve_prompts(each, x, batch.starts, place)
            firsts, counts, slots = self._spans
        out = x.new_empty(len(x), s.value_heads * s.value_dim)
        names = "a_log", "dt_bias", "norm"
        size = s.key_dim * s.value_dim * s.value_heads
        self.launch(
            delta_kernel,
            (len(slots), s.value_heads),
            *(out, mixed, x, *(each.tensors[name] for name in names), self._memories),
            *(slots, firsts, counts, x.shape[1], self._memories.stride(0), place * size),
            *(s.eps, LENGTH_EPS),
            H=s.value_heads,
            G=s.key_heads,
            K=s.key_dim,
            V=s.value_dim,
            KEYS=power(s.key_dim),
            VALUES=power(s.value_dim),
            FRESH=batch.starts is not None,
            num_warps=8 if s.key_dim * s.value_dim > 4096 else 4,
        )
        return out

    def _convolve_tokens(self, each: BoundMixer, x: Tensor, batch: Tokens, place: int) -> Tensor:
        s, width = self.settings, self.settings.mixed_width
        mixed = torch.empty(len(x), width, device=self.device)
        self.launch(
            convolve_token_kernel,
            (len(x), -(-width // BLOCK)),
            *(mixed, x, each.tensors["convolution"], self._windows, batch.slots, batch.positions),
            *(width, x.shape[1], self._windows.stride(0), place * width * (s.taps - 1)),
            TAPS=s.taps,
            BLOCK=BLOCK,
        )
        return mixed

    def _convolve_prompts(self, each: BoundMixer, x: Tensor, starts: Tensor, place: int) -> Tensor:
        """Convolve ``[T, channels]`` with zeros before each prompt. Store its last columns."""
        s = self.settings
        own, weight = x[:, : s.mixed_width].float(), each.tensors["convolution"][:, 0]
        row, total = torch.arange(len(x), device=self.device), own * weight[:, -1]
        for back in range(1, s.taps):
            source = row - back
            seen = own[source.clamp(min=0)].where((source >= starts)[:, None], 0.0)
            total += seen * weight[:, -1 - back]
        firsts, counts, slots = self._spans
        backs = torch.arange(s.taps - 1, 0, -1, device=self.device)
        source = (firsts + counts)[:, None] - backs
        kept = own[source.clamp(min=0)].where((source >= firsts[:, None])[..., None], 0.0)
        self._windows[slots, place] = kept.transpose(1, 2)
        return F.silu(total)

    def experts(self, each: BoundMixer, values: Values, batch: Tokens) -> Tensor:
        does = each.does
        out, x = values[does.out], values[does.x]
        logits, shared = values[does.logits], values[does.shared]
        s, num_pairs = self.settings, len(x) * self.settings.num_chosen
        shares = torch.empty(len(x), s.num_chosen, device=self.device)
        chosen = torch.empty_like(shares, dtype=torch.int32)
        self.launch(
            route_kernel,
            (len(x),),
            *(shares, chosen, logits, batch.positions, s.num_experts, logits.shape[1]),
            C=s.num_chosen,
            EXPERTS=power(s.num_experts),
            CHOICES=power(s.num_chosen),
        )
        order = starts = chosen
        if num_pairs > MAX_SMALL_PAIRS:
            order = torch.empty_like(chosen)
            starts = chosen.new_empty(s.num_experts + 1)
            made = order, starts, chosen, num_pairs
            block = min(4096, power(num_pairs)) if batch.starts is None else 4096
            self.launch(order_kernel, (s.num_experts + 1,), *made, BLOCK=block)
        inner = x.new_empty(num_pairs, s.expert_size)
        products = x.new_empty(num_pairs, s.hidden_size)
        pairs = chosen, order, starts
        self._expert_product(inner, x, each.tensors["gates_ups"], pairs, is_first=True)
        self._expert_product(products, inner, each.tensors["downs"], pairs, is_first=False)
        grid = len(x), -(-s.hidden_size // BLOCK)
        given = out, products, shares, chosen, shared, logits
        sizes = s.hidden_size, s.num_experts, logits.shape[1]
        self.launch(expert_sum_kernel, grid, *given, *sizes, C=s.num_chosen, BLOCK=BLOCK)
        return out

    def _expert_product(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        pairs: tuple[Tensor, Tensor, Tensor],
        *,
        is_first: bool,
    ) -> None:
        """Compute gates and ups (``is_first``), or the last matmul."""
        alone, width = len(out) <= MAX_SMALL_PAIRS, x.shape[1]
        outputs = 8 if alone else 32
        groups = len(out) if alone else self.settings.num_experts
        self.launch(
            expert_product_kernel,
            (-(-out.shape[1] // outputs), groups),
            *(out, x, weight, *pairs, out.shape[1]),
            WIDTH=width,
            C=self.settings.num_chosen,
            OWN=not is_first,
            PAIRS=1 if alone else 16 if len(x) <= 1024 else 64,
            OUTPUTS=outputs,
            COLUMNS=min(512 if alone else 128, power(width)),
            SWIGLU=is_first,
            ALONE=alone,
            num_warps=4,
        )
