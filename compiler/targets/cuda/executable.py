"""`CudaExecutable`: a program on a GPU with captured steps and device tables of slots."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cuda.collectives.group import RankGroup, meet
from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.graphs.capture import CapturedSlots, prompt_buckets
from tilewright.compiler.targets.cuda.graphs.draft_layer import CudaDraftLayer
from tilewright.compiler.targets.cuda.graphs.draft_steps import DraftSteps
from tilewright.compiler.targets.cuda.graphs.mixed_batch import MixedBatchRunner
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import Gpu
from tilewright.compiler.targets.cuda.lowering import has_mixers
from tilewright.compiler.targets.cuda.memory_budget import (
    capabilities_of,
    decode_rows,
    num_marks,
    prompt_sizes,
)
from tilewright.compiler.targets.cuda.notes import notes_of, prompt_wire
from tilewright.compiler.targets.cuda.numerics import EXACT_IN_BF16
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import choose_now, needs_host
from tilewright.compiler.targets.cuda.outputs.sampled_tokens import SampledTokenReader
from tilewright.compiler.targets.cuda.outputs.sampling_batch import SamplingBatch, drawing_of
from tilewright.compiler.targets.cuda.state.encoded_images import EncodedImages, has_offsets
from tilewright.compiler.targets.cuda.state.final_states import FinalStates
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.ragged import can_join, one, split
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.state.snapshot_positions import cut
from tilewright.compiler.targets.cuda.state.swap import SwappedSlots
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds, copy_bytes
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.host.choice import SlotState
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, MemoryUse
from tilewright.compiler.targets.interface.step import (
    GOES_ON,
    AssignPages,
    CloseSlot,
    CopyState,
    DropImage,
    DropSwapped,
    EncodeImage,
    LoadState,
    OpenSlot,
    PrefillChunk,
    SampledTokens,
    SamplerOutput,
    SaveState,
    Slot,
    StateUpdate,
    Step,
    StepOutput,
    SwapIn,
    SwapOut,
)
from tilewright.compiler.targets.interface.token_masks import NO_MASK, TokenMask
from tilewright.compiler.targets.program.instructions import KernelProgram
from tilewright.compiler.targets.tile_encoder import TileEncoderSettings
from tilewright.distributed.peers import SetupCollectives

_NUM_ENDS = 16
"""Maximum number of end tokens for a slot in device tables. The host checks further end tokens."""


class CudaExecutable(Executable):
    """A compiled model on one GPU, with one program for prefill and decode.

    The device selects tokens. The host selects tokens for requests with penalties, logit bias or
    log probabilities, after a wait for the logits.
    """

    remake: partial[CudaExecutable]
    """Makes the executable again from its weights, for another ``gpu``."""

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        options: CompileOptions,
        contract: NumericContract,
        device: torch.device,
        *,
        num_pages: int | None = None,
        copies: Kinds = NO_COPIES,
        draft_weights: Weights | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """Allocate the caches and tables.

        Args:
            num_pages: Shared cache pages. None: enough for all contexts at full length.
            copies: Dequantized weight copies.
            draft_weights: Weights of ``plan.draft_layer``.
            gpu: A GPU with the same kernels. None: the device.
        """
        self._gpu = gpu or nvrtc.gpu_of(device)
        self.contract, self.vocab_size = contract, plan.vocab_size
        self._draft_weights = draft_weights
        rows = decode_rows(options)
        num_pages = num_pages or options.max_batch * pages_of(options.max_context)
        self._state = PagedState(
            plan.states,
            options,
            device,
            num_pages=num_pages,
            sequence_specs=plan.sequence_states,
            num_marks=num_marks(plan, options),
        )
        how: dict[str, Any] = {"has_cpp": self._gpu.has_cpp, "reserved": copy_bytes(plan, copies)}
        self.capabilities = capabilities_of(plan, options, device, num_pages, **how)
        self.device, self._weights, self.logit_columns = device, weights, plan.logit_columns
        self._requested, self._is_exact = options.parallel.exchange, options.compute == "exact"
        self._steps = self._make_steps(plan, options, max_rows=rows[-1], copies=copies)
        self.notes = notes_of(self._steps, weights, options)
        if device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(device)
            self.device_detail = f"{self.device_name}, {self._steps.kernels()}"
        self._device_slots = SlotTable(options.max_batch, _NUM_ENDS, device)
        self._buckets = self._make_buckets(plan, rows, options)
        self._slot_states: dict[Slot, SlotState] = {}
        self._images = EncodedImages(device)
        self._away = SwappedSlots(self._slot_states, self._state, self._device_slots)
        self._captured_slots: CapturedSlots | None = None
        self._answers = SampledTokenReader(
            self._device_slots,
            self._slot_states,
            leave=self._leave,
            width=lambda: self.num_choosable,
            max_rows=max(options.max_batch, rows[-1]),
        )
        shared = self._state, self._device_slots, self._buckets, self._answers, self._slot_states
        self._joined = MixedBatchRunner(self._steps, *shared, check=self._check, leave=self._leave)
        self._drafts = DraftSteps(*shared, has_states=bool(plan.sequence_states), leave=self._leave)
        self._layer = self._make_layer(plan, draft_weights, rows, options)

    def _make_steps(
        self, plan: KernelProgram, options: CompileOptions, *, max_rows: int, copies: Kinds
    ) -> StepRunner:
        return StepRunner(
            plan,
            self._weights,
            self._state,
            max_rows=max_rows,
            exact=self._is_exact,
            prompt_wire=prompt_wire(options),
            strict_rows=self.capabilities.max_invariant_rows,
            copies=copies,
            gpu=self._gpu,
            max_drafts=self.capabilities.max_drafts,
        )

    def _make_layer(
        self,
        program: KernelProgram,
        weights: Weights | None,
        sizes: Sequence[int],
        options: CompileOptions,
    ) -> CudaDraftLayer | None:
        layer = program.draft_layer
        if layer is None or weights is None:
            return None
        self._joined.after = self._read_prompts
        how: dict[str, Any] = {"exact": self._is_exact, "gpu": self._gpu}
        steps = StepRunner(layer, weights, self._state, max_rows=sizes[-1], **how)
        kept = FinalStates(
            options.max_batch,
            prompt_sizes(program, options)[1],
            program.hidden_size,
            torch.float32 if self._is_exact else torch.bfloat16,
            self.device,
        )
        self._steps.final_states = kept
        return CudaDraftLayer(steps, kept, self._state, self._device_slots, sizes=sizes)

    def _read_prompts(self, chunks: Sequence[PrefillChunk]) -> None:
        """Run the draft layer for a prefill."""
        if self._layer is not None:
            self._layer.read_prompts(chunks, self._buckets.alignment, is_skipped=self._runs_alone)

    def _propose(self, step: Step) -> StepOutput:
        assert self._layer is not None and not (step.decode or step.prompts)
        self._leave()
        self._layer.num_choosable = self.num_choosable
        lengths = {slot: self._slot_states[slot].length for slot in step.proposes}
        drafts = self._layer.propose(step.proposes, lengths, self._drafts.next_tokens())
        tokens = [token for draft in drafts.values() for token in draft]
        sizes = [len(draft) for draft in drafts.values()]
        chosen = SampledTokens(tokens, [GOES_ON] * len(tokens), counts=sizes)
        self._answers.begin(1)
        return StepOutput((SamplerOutput(tuple(drafts), lambda: chosen),))

    def _count_layer_tokens(self, step: Step) -> None:
        """Let the draft layer read decoded tokens before they are overwritten."""
        if self._layer is None or not step.decode:
            return
        if self._layer.count_tokens(1 + max(map(len, step.drafts.values()), default=0)):
            self._drafts.settle()
            self._leave()
            self._layer.read_all({slot: state.length for slot, state in self._slot_states.items()})

    def _make_buckets(
        self, plan: KernelProgram, rows: Sequence[int], options: CompileOptions
    ) -> Buckets:
        return Buckets(
            self._steps,
            rows=rows,
            tokens=prompt_buckets(plan, options.parallel.tensor),
            num_choosable=lambda: self.num_choosable,
            table=self._device_slots,
            passes=lambda: self.capabilities.passes,
            most_pieces=lambda: self.capabilities.max_prompts,
            alignment=self.capabilities.alignment,
            max_drafts=self.capabilities.max_drafts,
            has_states=self.capabilities.has_sequence_state,
            runs_together=options.parallel.tensor == 1 and not has_mixers(plan),
        )

    def join(self, peers: SetupCollectives) -> None:
        how: dict[str, Any] = {"requested": self._requested, "why_no_peers": self._gpu.why_no_cpp}
        group = meet(peers, self.logit_columns, self.device, **how)
        self.notes = (*self.notes, *group.notes)
        self.unite(group)

    def unite(self, group: RankGroup) -> None:
        """Set the rank group. Call it before the first step."""
        self._steps.group = self._answers.group = group

    @property
    def _group(self) -> RankGroup | None:
        return self._steps.group

    def step(self, step: Step) -> StepOutput:
        running = self._captured_slots
        is_single = self._group is None and self._layer is None and not self._drafts.is_busy
        if running is None or not is_single or not running.is_repeated_by(step):
            return self._step(step)
        if step.edits:
            self._state.assign(cast(Sequence[AssignPages], step.edits))
        running.run(self._state, draws=True)
        return StepOutput((self._answers.repeated(running.slots, running.bucket.choice),))

    @torch.no_grad()
    def _step(self, step: Step) -> StepOutput:
        if self._group is not None:
            self._group.check()
        if self._layer is not None:
            self._layer.begin_step()
        self._count_layer_tokens(step)
        self._drafts.settle(step)
        if step.edits:
            self._apply(step.edits)
        if step.proposes:
            return self._propose(step)
        if step.forced:
            self._force(step)
        if step.prompts or step.drafts:
            return self._run_with_prompts(step)
        decodes = self._buckets.cut(step.decode)
        self._answers.begin(len(decodes))
        return StepOutput(tuple([self._decode(slots, step) for slots in decodes]))

    def _run_with_prompts(self, step: Step) -> StepOutput:
        """Run a step with prefill chunks or drafts."""
        limits = self.capabilities
        shares = limits.shares_passes(len(self._slot_states))
        decoding = step.decode if shares and self._rides(step) else ()
        max_rows = self._buckets.rows[-1] if shares else limits.invariant_rows
        plain, verified = self._drafts.divide(step, max_rows)
        decodes = () if decoding else self._buckets.cut(plain)
        batches, alone = split(
            [chunk for chunk in step.prompts if not self._runs_alone(chunk)],
            limits.max_prompts if shares else 1,
            limits=limits,
            beside=bool(decoding),
        )
        alone += [chunk for chunk in step.prompts if self._runs_alone(chunk)]
        self._answers.begin(len(decodes) + len(verified) + len(batches) + len(alone))
        parts = [self._drafts.run(slots, step) for slots in verified]
        parts += [self._decode(slots, step) for slots in decodes]
        for index, batch in enumerate(batches):
            parts += self._joined.run(batch, step, () if index else decoding)
        parts += [part for each in alone if (part := self._prompt(each, step)) is not None]
        return StepOutput(tuple(parts), is_mixed=bool(decoding) and len(batches) == 1 and not alone)

    def _rides(self, step: Step) -> bool:
        """Return whether decode rows join a mixed batch.

        They join if a captured size fits the rows and the device selects all tokens.
        """
        limits = self.capabilities
        if step.drafts or not (limits.passes and step.decode):
            return False
        states = [self._slot_states[slot] for slot in step.decode]
        if any(state.rotary_delta or state.images for state in states):
            return False
        prompts = [chunk for chunk in step.prompts if not self._runs_alone(chunk)]
        joined = [chunk for chunk in prompts if can_join(chunk, limits)]
        if not joined:
            return False
        slots = (*step.decode, *(chunk.slot for chunk in step.prompts if chunk.chooses))
        num_rows = len(step.decode) + min(len(joined), limits.max_prompts)
        return num_rows <= limits.passes[-1][0] and self._answers.may_be_captured(slots, step)

    @torch.no_grad()
    def prepare(self) -> None:
        assert not self._slot_states, "a slot is in use"
        limits, is_gpu = self.capabilities, self.device.type == "cuda"
        longest = min(limits.max_step_tokens, limits.max_context)
        with self._group.patiently() if self._group else contextlib.nullcontext():
            self._buckets.prepare(longest, runs_long=is_gpu)
            if self._layer is not None:
                self._layer.num_choosable = self.num_choosable
                self._layer.prepare()

    @property
    def num_captures(self) -> int:
        of_layer = 0 if self._layer is None else self._layer.num_captures
        return of_layer + self._buckets.num_captures

    def reset(self) -> None:
        self._captured_slots = None
        self._drafts.forget()
        if self._layer is not None:
            self._layer.forget()
        self._answers.forget()
        self._slot_states.clear()
        self._images.clear()
        self._away.forget()
        self._state.reset()

    def _apply(self, edits: Sequence[StateUpdate]) -> None:
        """Apply all state updates in order. Tables and pages are sent to the device together."""
        if any(not isinstance(edit, AssignPages | CloseSlot) for edit in edits):
            self._leave()
        opened: dict[Slot, SamplingParams] = {}
        if self._layer is not None and self._captured_slots is not None:
            self._captured_slots.settle(self._slot_states)
        for edit in edits:
            if self._layer is not None:
                self._layer.update(edit, self._slot_states)
            if isinstance(edit, OpenSlot):
                assert edit.slot not in self._slot_states, f"slot {edit.slot} is taken"
                assert 0 <= edit.slot < self.capabilities.max_num_seqs, f"there is no {edit}"
                self._slot_states[edit.slot] = SlotState(
                    edit.sampling, edit.prompt, edit.keeps, rotary_delta=edit.rotary_delta
                )
                opened[edit.slot] = edit.sampling
                self._answers.open(edit.slot, edit.sampling.stop_token_ids)
            elif isinstance(edit, CloseSlot):
                del self._slot_states[edit.slot]
                self._answers.close(edit.slot)
                self._state.clear(edit.slot)
            elif isinstance(edit, AssignPages):
                self._state.note(edit)
            else:
                self._move(edit)
        self._state.deal([edit for edit in edits if isinstance(edit, AssignPages)])
        self._device_slots.open(opened)

    def _move(self, edit: StateUpdate) -> None:
        """Copy state within the device, to the host or back. Encode or drop an image."""
        if isinstance(edit, EncodeImage):
            assert self.encoder is not None, "there is no tower"
            self._images.encode(edit, self.encoder, value_bytes=self.image_value_bytes)
        elif isinstance(edit, DropImage):
            self._images.drop(edit.image)
        elif isinstance(edit, CopyState):
            self._state.copy(edit.source, edit.target, edit.num_positions)
            self._slot_states[edit.target].length = edit.num_positions
            self._slot_states[edit.target].images = self._slot_states[edit.source].images
        elif isinstance(edit, SaveState):
            self._state.save(edit.slot, edit.snapshot, self._slot_states[edit.slot].length)
        elif isinstance(edit, LoadState):
            self._slot_states[edit.slot].length = self._state.load(edit.slot, edit.snapshot)
        else:
            assert isinstance(edit, SwapOut | SwapIn | DropSwapped), edit
            self._away.apply(edit)
            if self._layer is not None and isinstance(edit, SwapIn):
                self._layer.resume(edit.slot, self._slot_states[edit.slot])

    def agreed(self) -> bytes:
        self._drafts.settle()
        self._leave()
        return self._device_slots.agreed(
            {slot: each.length for slot, each in self._slot_states.items()}
        )

    def _leave(self) -> None:
        """Write the previous bucket's tokens and lengths back to the tables."""
        if (running := self._captured_slots) is not None:
            running.settle(self._slot_states)
            self._device_slots.give_back(running.at, running.bucket.rows.tokens)
            self._captured_slots = None

    def _force(self, step: Step) -> None:
        """Write forced tokens into the table."""
        self._leave()
        self._device_slots.put(list(step.forced), list(step.forced.values()))
        for slot, token in step.forced.items():
            self._slot_states[slot].force(token)

    def _decode(self, slots: tuple[Slot, ...], step: Step) -> SamplerOutput:
        """Decode one token for every slot. The slots must fit a bucket."""
        if self._captured_slots is None or self._captured_slots.slots is not slots:
            self._leave()
            self._captured_slots = self._fill_slots(slots)
        running = self._captured_slots
        bucket = running.bucket
        is_captured = not running.is_late and self._answers.may_be_captured((), step)
        is_final = is_captured and not step.masked
        running.run(self._state, draws=is_final)
        if is_final:
            logits = bucket.logits[: len(slots)] if step.want_logits else bucket.logits
            return self._answers.chosen(slots, logits, bucket.choice, step)
        running.settle(self._slot_states)
        if not is_captured:
            return self._answers.late(slots, bucket.logits[: len(slots)], step)
        return self._answers.masked(slots, bucket, step, running.drawing)

    def _fill_slots(self, slots: tuple[Slot, ...]) -> CapturedSlots:
        """Assign slots to the smallest bucket's rows."""
        bucket = self._buckets.decode(len(slots))
        lengths = np.array([self._slot_states[slot].length for slot in slots], dtype=np.int64)
        offsets = np.array([self._slot_states[slot].rotary_delta for slot in slots])
        at = bucket.admit(self._device_slots, slots, lengths, offsets)
        bucket.show(self._images, [self._slot_states[slot].images for slot in slots])
        chosen = [self._slot_states[slot].sampling for slot in slots]
        is_late = any(map(needs_host, chosen))
        return CapturedSlots(slots, bucket, at, drawing_of(chosen), is_late, lengths)

    def _check(self, chunk: PrefillChunk) -> SlotState:
        """Check a chunk's pages and return its slot state. Its slot leaves the captured slots."""
        if self._captured_slots is not None and chunk.slot in self._captured_slots.slots:
            self._leave()
        slot_state = self._slot_states[chunk.slot]
        assert chunk.start <= slot_state.length, f"slot {chunk.slot}: {chunk.start} leaves a gap"
        self._state.check(chunk.slot, chunk.end)
        return slot_state

    def _prompt(self, chunk: PrefillChunk, step: Step) -> SamplerOutput | None:
        """Run a prefill chunk. Return None if the chunk has no output."""
        slot_state = self._check(chunk)
        sections, found = cut(chunk, self.capabilities.marks), None
        assert len(sections) == 1 or not chunk.echoes, "a chunk that echoes is in one piece"
        pooled: list[Tensor] = []
        for section in sections:
            slot_state.length, slot_state.token = section.end, None
            slot_state.images = section.visible[-1].images if section.visible else ()
            if chunk.pools:
                rows, _ = one(section, self.device, self._state.marks((section,)))
                rows = self._with_images(rows, section)
                pooled.append(self._steps.pool(rows, from_start=section.start == 0))
            else:
                found = self._run_prompt(section, step)
            self._state.keep((section,))
        if chunk.pools:
            return self._answers.pooled(pooled, len(chunk.tokens))
        return found

    def _run_prompt(self, chunk: PrefillChunk, step: Step) -> SamplerOutput | None:
        """Run a section of a chunk. Use a CUDA graph if it is short and has logits for the last
        token at most.
        """
        chosen = [self._slot_states[slot].sampling for slot in (chunk.slot, *chunk.also)]
        is_late = self._answers.is_late((chunk.slot, *chunk.also), step)
        drawing = None if is_late else drawing_of(chosen)
        marks = self._state.marks((chunk,))
        is_captured = not (chunk.echoes or self._runs_alone(chunk))
        if len(chunk.tokens) <= self._buckets.tokens[-1] and is_captured:
            bucket = self._buckets.prompt(len(chunk.tokens))
            bucket.run(chunk, drawing, marks)
            choice, logits = bucket.choice, bucket.logits
        else:
            placed, wanted = one(chunk, self.device, marks)
            placed = self._with_images(placed, chunk)
            from_start = chunk.start == 0
            found = self._steps.prefill(placed, logit_rows=wanted, from_start=from_start)
            if found is None:
                self._read_prompts((chunk,))
                return None
            logits = found
            of = (chunk.slot,), (chunk.end,), self.num_choosable, logits[-1:]
            choice = choose_now(self._device_slots, *of, chosen if not is_late else (), self._group)
        self._read_prompts((chunk,))
        return self._end_prompt(chunk, step, logits, choice, is_late)

    def _runs_alone(self, chunk: PrefillChunk) -> bool:
        """Return whether a chunk needs a forward of its own, without a graph."""
        delta = self._slot_states[chunk.slot].rotary_delta
        return bool(chunk.visible) or has_offsets(chunk, delta)

    def _with_images(self, rows: TokenBatch, chunk: PrefillChunk) -> TokenBatch:
        delta = self._slot_states[chunk.slot].rotary_delta
        return self._images.add_to_rows(rows, chunk, self.encoder, rotary_delta=delta)

    def _end_prompt(
        self, chunk: PrefillChunk, step: Step, logits: Tensor, choice: SamplingBatch, is_late: bool
    ) -> SamplerOutput | None:
        if not (chunk.chooses or chunk.echoes):
            return None
        slots = (chunk.slot, *chunk.also) if chunk.chooses else ()
        for slot in slots[1:]:
            self._state.copy(chunk.slot, slot, chunk.end)
            if self._layer is not None:
                self._layer.copy(chunk.slot, slot, chunk.end)
            self._slot_states[slot].length = chunk.end
            self._slot_states[slot].images = self._slot_states[chunk.slot].images
        if is_late:
            return self._answers.late(slots, logits, step, chunk if chunk.echoes else None)
        if len(slots) > 1:
            ends = [chunk.end] * len(slots)
            chosen = [self._slot_states[slot].sampling for slot in slots]
            logits_each, width = logits[-1:].repeat(len(slots), 1), self.num_choosable
            choice = choose_now(
                self._device_slots, slots, ends, width, logits_each, chosen, self._group
            )
        for row, slot in enumerate(slots):
            self._device_slots.hold(slot, choice.tokens[row : row + 1])
        return self._answers.chosen(slots, logits, choice, step)

    @torch.no_grad()
    def choose(self, output: StepOutput, allowed: TokenMask) -> None:
        is_pending = self._answers.is_waiting or self._drafts.is_in_flight
        assert is_pending or not output.parts, "no choice waits"
        self._answers.choose(allowed)

    @torch.no_grad()
    def follow_choice(self) -> None:
        self._answers.choose(NO_MASK)

    @torch.no_grad()
    def chosen_experts(self, slots: Sequence[Slot], tokens: Sequence[int]) -> list[int]:
        """Read a token on each slot and count the distinct selected experts by layer.

        For measurements: no graph is used and no token is selected.
        """
        self._drafts.settle()
        self._leave()
        lengths = [self._slot_states[slot].length for slot in slots]
        rows = TokenBatch(*torch.tensor([tokens, lengths, slots]).to(self.device))
        for slot in slots:
            self._slot_states[slot].length += 1
        return self._steps.chosen_experts(rows)

    def memory(self) -> MemoryUse:
        copies = self._steps.copies.num_bytes
        state = self._state.num_used_bytes() + self._images.num_bytes
        weights = self._weights.num_bytes
        if self._draft_weights is not None:
            weights += self._draft_weights.bytes_beside(self._weights)
        return MemoryUse(weights + copies, state, copies)

    @property
    def image_value_bytes(self) -> int:
        """Return an image value's bytes: 2 if bfloat16 represents all keys and values."""
        settings = None if self.encoder is None else self.encoder.settings
        if self._is_exact or not isinstance(settings, TileEncoderSettings):
            return 4
        return 2 if settings.cache_format in EXACT_IN_BF16 else 4

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return self._state.num_bytes(num_positions, num_sequences)

    def close(self) -> None:
        self._captured_slots = None
        group = self._group if "_steps" in vars(self) else None
        names = ("_joined", "_layer", "_draft_weights", "_drafts", "_buckets", "_steps", "_state")
        for name in (*names, "_weights", "remake", "_images"):
            vars(self).pop(name, None)  # it may be closed twice
        if self.device.type == "cuda":
            gc.collect()  # captured steps and their functions reference each other
        if group is not None:
            group.close()  # the graphs, which use the group's memory, are freed first
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
