"""A plan on a device as an `Executable`: slots and pages, buckets of captured steps, results read
one step late.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from tilewright.compiler.targets.base import (
    Capabilities,
    CompileOptions,
    Executable,
    MemoryUse,
    StateHandle,
    StepInput,
    StepOutput,
)
from tilewright.compiler.targets.contract import NumericContract
from tilewright.compiler.targets.cuda.capture import (
    Choice,
    DecodeBucket,
    PromptBucket,
    make_choice,
    prompt_buckets,
)
from tilewright.compiler.targets.cuda.device import PROMPT_CHUNK
from tilewright.compiler.targets.cuda.instructions import Plan
from tilewright.compiler.targets.cuda.state import PagedState
from tilewright.compiler.targets.cuda.steps import MAX_ROWS, Rows, Steps
from tilewright.compiler.targets.cuda.weights import Weights

_NUM_ENDS = 16
"""End tokens of a row that captured steps have room for; more capture anew."""
_NUM_READINGS = 4


class CudaExecutable(Executable):
    """One plan, one device, both phases."""

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        options: CompileOptions,
        contract: NumericContract,
        device: torch.device,
    ) -> None:
        self.contract = contract
        buckets = tuple(size for size in (1, 2, 4, 8, 16, 32, 64) if size < 2 * options.max_batch)
        is_gpu = device.type == "cuda"
        self.capabilities = Capabilities(
            max_batch=options.max_batch,
            max_context=options.max_context,
            max_prefill_sequences=1,
            mixed_steps=False,
            buckets=buckets,
            prefill_chunk=PROMPT_CHUNK if is_gpu else None,
            runs_ahead=is_gpu,
        )
        self.vocab_size = plan.vocab_size
        self._device, self._weights = device, weights
        self._state = PagedState(plan.states, options, device, sequence_specs=plan.sequence_states)
        self._steps = Steps(
            plan,
            weights,
            self._state,
            max_rows=min(MAX_ROWS, buckets[-1]),
            exact=options.compute == "exact",
        )
        if is_gpu:
            self.device_name = torch.cuda.get_device_name(device)
            self.device_detail = f"{self.device_name}, {self._steps.kernels()}"
        self._graphs = torch.cuda.graph_pool_handle() if is_gpu else None
        self._prompt_sizes = prompt_buckets(plan)
        self._decodes: dict[int, DecodeBucket] = {}
        self._prompts: dict[int, PromptBucket] = {}
        self._readings: list[tuple[Tensor, Tensor]] = []
        self._num_readings = 0
        self._num_ends = _NUM_ENDS
        self._last: StepInput | None = None
        self._running: DecodeBucket | None = None

    @torch.no_grad()
    def step(self, inputs: StepInput) -> StepOutput:
        if self._running is not None and inputs.continues(self._last):
            output = self._replay(self._running, inputs)
        else:
            self._running = None
            output = self._start(inputs.settled())
        self._count(inputs)
        self._last = inputs
        return output

    def _count(self, inputs: StepInput) -> None:
        """How far the sequences have come, where a copy of their state needs it."""
        if not self._state.sequences:
            return
        positions = inputs.positions.tolist()
        for handle, end in zip(inputs.states, inputs.cu_seqlens[1:].tolist(), strict=True):
            self._state.ran(handle, positions[end - 1] + inputs.advanced + 1)

    def _start(self, inputs: StepInput) -> StepOutput:
        bounds = inputs.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        assert len(inputs.states) == 1 or max(lengths) == 1, "phases or prefills were mixed"
        for handle in inputs.states:
            assert handle in self._state, f"state {handle} is not reserved"
        self._make_room_for_ends(inputs)
        if lengths[0] > 1:
            return self._prefill(inputs)
        if len(lengths) > MAX_ROWS:
            return self._decode_parts(inputs)
        bucket = self._decode_bucket(len(lengths))
        slots = torch.tensor(inputs.states, dtype=torch.int64)
        bucket.rows.upload(inputs.tokens, inputs.positions, slots)
        all_rows = len(inputs.logit_rows) == len(lengths)
        if inputs.sampling is not None:
            bucket.choice.upload(inputs.sampling, None if all_rows else inputs.logit_rows)
        if all_rows:
            self._running = bucket
        return self._replay(bucket, inputs)

    def _make_room_for_ends(self, inputs: StepInput) -> None:
        width = 0 if inputs.sampling is None else inputs.sampling.end_tokens.shape[1]
        if width > self._num_ends:
            self._num_ends = 1 << (width - 1).bit_length()
            self._decodes.clear()
            self._prompts.clear()

    def _replay(self, bucket: DecodeBucket, inputs: StepInput) -> StepOutput:
        """A decode step whose inputs are on the device; ``inputs`` says what is wanted of it."""
        is_greedy = inputs.sampling is None or inputs.sampling.is_greedy
        bucket.run(is_greedy=is_greedy)
        return self._output(inputs, bucket.logits, bucket.choice)

    def _output(self, inputs: StepInput, logits: Tensor, choice: Choice) -> StepOutput:
        rows = inputs.logit_rows
        wanted = None
        if inputs.want_logits:
            wanted = logits[: inputs.num_sequences].to("cpu", copy=True)
            wanted = wanted[rows] if len(rows) < len(wanted) else wanted
        if inputs.sampling is None:
            return StepOutput(logits=wanted)
        count = len(rows)
        tokens, finished = choice.tokens[:count], choice.finished[:count]
        if 1 < inputs.num_sequences != count:
            chosen = rows.to(self._device)
            tokens, finished = choice.tokens[chosen], choice.finished[chosen]
        return StepOutput(tokens, finished, wanted, self._reading(tokens, finished))

    def _reading(
        self, tokens: Tensor, finished: Tensor
    ) -> Callable[[], tuple[list[int], list[bool]]]:
        """The results on their way to the host, behind the step that makes them."""
        if self._device.type != "cuda":
            found = tokens.tolist(), finished.tolist()
            return lambda: found
        if not self._readings:
            size = self.capabilities.max_batch
            self._readings = [
                (
                    torch.empty(size, dtype=torch.int64, pin_memory=True),
                    torch.empty(size, dtype=torch.bool, pin_memory=True),
                )
                for _ in range(_NUM_READINGS)
            ]
        kept = self._readings[self._num_readings % _NUM_READINGS]
        self._num_readings += 1
        places = kept[0][: len(tokens)], kept[1][: len(tokens)]
        places[0].copy_(tokens, non_blocking=True)
        places[1].copy_(finished, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        read: list[tuple[list[int], list[bool]]] = []

        def arrived() -> tuple[list[int], list[bool]]:
            if not read:  # the place is used again later
                event.synchronize()
                read.append((places[0].tolist(), places[1].tolist()))
            return read[0]

        return arrived

    def _decode_parts(self, inputs: StepInput) -> StepOutput:
        """More sequences than a bucket has rows: one after another, as many as fit."""
        found, logits = [], []
        for first in range(0, len(inputs.states), MAX_ROWS):
            output = self._start(_part_of(inputs, slice(first, first + MAX_ROWS)))
            if inputs.sampling is not None:
                found.append(output.read())
            if output.logits is not None:
                logits.append(output.logits)
        self._running = None
        return StepOutput(
            token_ids=torch.tensor([token for tokens, _ in found for token in tokens]),
            finished=torch.tensor([end for _, ends in found for end in ends], dtype=torch.bool),
            logits=torch.cat(logits) if logits else None,
        )

    def _prefill(self, inputs: StepInput) -> StepOutput:
        """Tokens of one prompt: captured where it is short, and its last token wants logits."""
        tokens, first, slot = inputs.tokens, int(inputs.positions[0]), inputs.states[0]
        is_greedy = inputs.sampling is None or inputs.sampling.is_greedy
        rows = inputs.logit_rows.tolist()
        if len(tokens) <= self._prompt_sizes[-1] and rows in ([], [len(tokens) - 1]):
            bucket = self._prompt_bucket(len(tokens))
            if inputs.sampling is not None:
                bucket.choice.upload(inputs.sampling)
            bucket.run(tokens, first, slot, is_greedy=is_greedy)
            return self._output(inputs, bucket.logits, bucket.choice)
        device = self._device
        placed = Rows(
            tokens.to(device),
            inputs.positions.to(device),
            torch.full_like(tokens, slot).to(device),
        )
        wanted = inputs.logit_rows.to(device) if rows else None
        logits = self._steps.prefill(placed, logit_rows=wanted, from_start=first == 0)
        if logits is None:
            return StepOutput()
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=device)
        choice = make_choice(len(rows), self.vocab_size, self._num_ends, chosen, device)
        if inputs.sampling is not None:
            choice.upload(inputs.sampling)
            choice.apply(logits, is_greedy=is_greedy)
        output = self._output(replace(inputs, want_logits=False), logits, choice)
        if not inputs.want_logits:
            return output
        return StepOutput(
            output.token_ids, output.finished, logits.to("cpu", copy=True), output.arrived
        )

    def _decode_bucket(self, num_rows: int) -> DecodeBucket:
        size = next(size for size in self.capabilities.buckets if size >= num_rows)
        if size not in self._decodes:
            self._decodes[size] = DecodeBucket(
                self._steps, size, self.vocab_size, self._num_ends, self._graphs
            )
        return self._decodes[size]

    def _prompt_bucket(self, num_tokens: int) -> PromptBucket:
        size = next(size for size in self._prompt_sizes if size >= num_tokens)
        if size not in self._prompts:
            self._prompts[size] = PromptBucket(
                self._steps, size, self.vocab_size, self._num_ends, self._graphs
            )
        return self._prompts[size]

    @torch.no_grad()
    def chosen_experts(self, inputs: StepInput) -> list[int]:
        """Run a decode step and count, layer by layer, the different experts its rows chose.

        For measurements: it is not captured, and chooses no tokens.
        """
        slots = torch.tensor(inputs.states, dtype=torch.int64)
        rows = Rows.padding(inputs.num_sequences, self._device)
        rows.upload(inputs.tokens, inputs.positions, slots)
        self._running = None
        counts = self._steps.chosen_experts(rows)
        self._count(inputs)
        self._last = inputs
        return counts

    def reserve(self, num_positions: int) -> StateHandle:
        return self._state.reserve(num_positions)

    def free(self, handle: StateHandle) -> None:
        self._state.free(handle)

    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        return self._state.copy(handle, num_positions)

    def num_free(self) -> int:
        return self._state.num_free()

    def memory(self) -> MemoryUse:
        return MemoryUse(self._weights.num_bytes, self._state.num_bytes_taken())

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return self._state.num_bytes(num_positions, num_sequences)

    def close(self) -> None:
        self._decodes.clear()
        self._prompts.clear()
        self._running = self._last = None
        del self._steps, self._state, self._weights
        if self._device.type == "cuda":
            gc.collect()  # a captured step and what it runs hold each other
            torch.cuda.empty_cache()


def _part_of(inputs: StepInput, part: slice) -> StepInput:
    """Some sequences of a decode step."""
    states = inputs.states[part]
    rows = inputs.logit_rows
    chosen = (rows >= part.start) & (rows < part.start + len(states))
    sampling = inputs.sampling
    if sampling is not None:
        cut = {
            each.name: getattr(sampling, each.name)[chosen]
            for each in fields(sampling)
            if each.name != "is_greedy"
        }
        sampling = replace(sampling, **cut)
    return replace(
        inputs,
        tokens=inputs.tokens[part],
        positions=inputs.positions[part],
        cu_seqlens=torch.arange(len(states) + 1),
        logit_rows=rows[chosen] - part.start,
        states=states,
        sampling=sampling,
    )
