"""The plan on a GPU: kernels in graphs, one for each size of decode step and of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import CHOICES
from tilewright.compiler.targets.cuda.engine_generator.parts.launches import (
    LIBRARY,
    WAYS,
    CudaKernels,
    Tokens,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.pages import PAGE, Pages
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Gather, Linear
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import EngineError, Settings
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound, Values

MOST_TOKENS = 8192
"""Tokens of prompts that are computed together; a longer prompt goes alone."""

SPLIT_FROM = 512
"""Positions from which decode attention is cut into parts."""

NUM_SEATS = 64


@dataclass
class CudaSequence:
    """``seat``: its row in the table of pages."""

    seat: int
    pages: list[int]
    length: int


@dataclass(frozen=True)
class Captured:
    """A graph, the tensor that it reads and the values that it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    values: Values


class CudaExecutor(CudaKernels):
    """Sequences in pages; steps padded to the sizes that graphs were captured for.

    ``prompt_sizes``: those of the graphs for prompts, in tokens.
    """

    prompt_sizes: tuple[int, ...] = CHOICES.prompts

    def __init__(
        self, tensors: dict[str, Tensor], settings: Settings, device: torch.device
    ) -> None:
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            raise EngineError(f"device '{device}'; GPUs that torch finds here: {count}")
        super().__init__(tensors, settings, device)
        last = next(i for i, each in enumerate(self.program) if isinstance(each.does, Gather))
        self._body, self._tail = self.program[:last], self.program[last:]
        self.pages = Pages(settings, device)
        self._graphs: dict[tuple[str, int, int], Captured] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._rows = torch.empty(0, -(-settings.max_positions // PAGE), dtype=torch.int64)
        self._make_seats(NUM_SEATS)
        with self._here():
            self._prepare()

    def _prepare(self) -> None:
        """Compile every kernel and capture the graphs that calls are expected to need."""
        if self.device.type != "cuda":
            return
        for rows in CHOICES.batches:
            self._time_products(rows)
        for rows in CHOICES.batches:
            for splits in {1, self._splits(rows, self.settings.max_positions)}:
                self._captured("decode", rows, splits)
        for rows in self.prompt_sizes:
            if rows <= self.settings.max_positions * CHOICES.batches[-1]:
                self._captured("prompts", rows, 1)
        for rows in CHOICES.batches:
            x = torch.zeros(rows, self.settings.hidden_size, dtype=self.settings.dtype)
            self.run(self._tail[1:], {self._tail[0].does.out: x.to(self.device)}, None)
        torch.cuda.synchronize(self.device)

    def _time_products(self, rows: int) -> None:
        """Find the way of each product with which a decode step of so many rows is fastest."""
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
        """Whether a way of a product is right on random rows: the library's."""
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
        """Milliseconds of a few decode steps of so many rows, by the ways that are chosen now."""
        graph = self._capture("decode", self._inputs("decode", rows), 1, pool=None).graph
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for index in range(7):
            if index == 2:
                begin.record()
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    # Prompts: whole, from position 0, side by side in one step.

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
            for each in sequences:
                self.release(each)
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
        values = self._replay(found) if found else self._run_prompts(inputs)
        x = values[self._tail[0].does.x].index_select(0, inputs[3, : len(prompts)])
        return self.run(self._tail[1:], {self._tail[0].does.out: x}, None)["logits"]

    def _run_prompts(self, inputs: Tensor) -> Values:
        tokens, starts, places, _ = inputs
        return self.run(self._body, {}, Tokens(tokens, starts=starts, places=places))

    def _staged(
        self, sequences: Sequence[CudaSequence], prompts: Sequence[Tensor], size: int
    ) -> Tensor:
        """Of a step of prompts, ``[4, size]``: tokens, starts, places, and the last row of each.

        Arrays of the standard library's: many small tensors take the host longer.
        """
        tokens, starts, places, lasts = array("q"), array("q"), array("q"), array("q")
        for prompt in prompts:
            tokens.extend(prompt.tolist())
        width = self.settings.head_dim
        for each in sequences:
            starts.extend([len(starts)] * each.length)
            for page in each.pages:
                places.extend(range(page, page + PAGE * width, width))
            del places[len(starts) :]
            lasts.append(len(starts) - 1)
        starts.extend(range(len(starts), size))
        places.extend([-1] * (size - len(places)))
        for part in (tokens, lasts):
            part.extend([0] * (size - len(part)))
        return torch.frombuffer(tokens + starts + places + lasts, dtype=torch.int64).view(4, size)

    # Decode: one token of each sequence.

    def decode(self, sequences: Sequence[CudaSequence], tokens: Tensor) -> Tensor:
        with self._here():
            return self._decode(sequences, tokens)

    def _decode(self, sequences: Sequence[CudaSequence], tokens: Tensor) -> Tensor:
        grown = [each for each in sequences if each.length == len(each.pages) * PAGE]
        for each in grown:
            each.pages += self.pages.take(1)
        if grown:
            self._upload_pages(grown)
        count, longest = len(sequences), max(each.length for each in sequences)
        size = next((size for size in CHOICES.batches if size >= count), -(-count // 64) * 64)
        found = self._captured("decode", size, self._splits(size, longest))
        padding = [0] * (size - count)
        positions = [*(each.length for each in sequences), *([-1] * (size - count))]
        seats = [*(each.seat for each in sequences), *padding]
        is_here = tokens.device.type == "cpu"
        ids = [*tokens.tolist(), *padding] if is_here else [0] * size
        self._send(torch.tensor([ids, positions, seats]), found.inputs)
        if not is_here:
            found.inputs[0, :count].copy_(tokens)
        values = self._replay(found)
        for each in sequences:
            each.length += 1
        return values["logits"][:count].clone()

    def _run_decode(self, inputs: Tensor, splits: int) -> Values:
        tokens, positions, seats = inputs
        batch = Tokens(tokens, positions=positions, seats=seats, table=self._table, splits=splits)
        return self.run(self.program, {}, batch)

    def _splits(self, rows: int, longest: int) -> int:
        """Parts of decode attention: enough to fill the device, where there is enough to do."""
        if longest < SPLIT_FROM:
            return 1
        wanted = 2 * self.num_processors // (rows * self.settings.num_kv_heads)
        return max(1, min(32, 1 << max(0, wanted).bit_length() >> 1))

    # Graphs.

    def _captured(self, kind: str, size: int, splits: int) -> Captured:
        """The graph of a step of this size, captured when it is first asked for."""
        key = kind, size, splits
        if key not in self._graphs:
            inputs, pool = self._inputs(kind, size), self._graph_memory
            self._graphs[key] = self._capture(kind, inputs, splits, pool)
        return self._graphs[key]

    def _inputs(self, kind: str, size: int) -> Tensor:
        """What a graph reads: rows of padding."""
        inputs = torch.zeros(3 if kind == "decode" else 4, size, dtype=torch.int64)
        if kind == "decode":
            inputs[1] = -1
        else:
            inputs[1], inputs[2] = torch.arange(size), -1
        return inputs.to(self.device)

    def _capture(self, kind: str, inputs: Tensor, splits: int, pool: Any) -> Captured:
        """``pool``: of memory that its graphs share, which live as long as the engine; or None."""

        def step() -> Values:
            if kind == "decode":
                return {"logits": self._run_decode(inputs, splits)["logits"]}
            x = self._tail[0].does.x
            return {x: self._run_prompts(inputs)[x]}

        step()  # compiles what is new
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            values = step()
        return Captured(graph, inputs, values)

    def _replay(self, found: Captured) -> Values:
        found.graph.replay()
        return found.values

    def _here(self) -> Any:
        """Kernels go to the current device, which need not be the engine's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # Seats and pages.

    def _open(self, length: int) -> CudaSequence:
        if not self._free_seats:
            self._make_seats(2 * len(self._rows))
        pages = self.pages.take(-(-length // PAGE))
        return CudaSequence(self._free_seats.pop(), pages, length)

    def release(self, sequence: CudaSequence) -> None:
        self.pages.give(sequence.pages)
        self._free_seats.append(sequence.seat)

    def _make_seats(self, count: int) -> None:
        """The table of pages, with ``count`` rows; graphs that read a smaller one are dropped."""
        fresh = torch.zeros(count, self._rows.shape[1], dtype=torch.int64)
        taken = len(self._rows)
        fresh[:taken] = self._rows
        self._rows, self._table = fresh, fresh.to(self.device)
        self._free_seats = list(reversed(range(taken, count)))
        self._graphs = {key: each for key, each in self._graphs.items() if key[0] != "decode"}

    def _upload_pages(self, sequences: Sequence[CudaSequence]) -> None:
        for each in sequences:
            self._rows[each.seat, : len(each.pages)] = torch.tensor(each.pages)
        seats = torch.tensor([each.seat for each in sequences])
        self._table.index_copy_(0, self._send(seats), self._send(self._rows[seats]))

    def _send(self, values: Tensor, to: Tensor | None = None) -> Tensor:
        """Copy a tensor of the host's to the device, without waiting for what the device does."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        if to is None:
            return values.to(self.device, non_blocking=True)
        return to.copy_(values, non_blocking=True)


def _cuts(lengths: Sequence[int]) -> list[int]:
    """Where a list of prompts is cut, so that a step has few enough tokens."""
    cuts, total = [], 0
    for index, length in enumerate(lengths):
        if total and total + length > MOST_TOKENS:
            cuts.append(index)
            total = 0
        total += length
    return [*cuts, len(lengths)]
