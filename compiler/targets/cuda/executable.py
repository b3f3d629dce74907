"""A plan on a device as an `Executable`: buckets of captured steps over the tables of seats."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cuda.collectives.exchange import PROMPT_WIRE
from tilewright.compiler.targets.cuda.collectives.group import Group, meet
from tilewright.compiler.targets.cuda.graphs.buckets import Buckets, prepared_rows_of
from tilewright.compiler.targets.cuda.graphs.capture import Seated, decode_buckets, prompt_buckets
from tilewright.compiler.targets.cuda.graphs.mixed_batch import Joined
from tilewright.compiler.targets.cuda.memory_budget import capabilities_of, num_marks
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import choose_now, needs_host
from tilewright.compiler.targets.cuda.outputs.sampled_tokens import Answers
from tilewright.compiler.targets.cuda.outputs.sampling_batch import Choice, drawing_of
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.ragged import can_join, one, split
from tilewright.compiler.targets.cuda.state.slot_table import SeatTable
from tilewright.compiler.targets.cuda.state.snapshot_positions import cut
from tilewright.compiler.targets.cuda.state.swap import Away
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import Rows
from tilewright.compiler.targets.cuda.steps.run import Steps
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds, copy_bytes
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.host.executable import Sitting
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, MemoryUse
from tilewright.compiler.targets.interface.step import (
    Back,
    Chunk,
    Close,
    Copy,
    Drop,
    Edit,
    Load,
    Open,
    Out,
    Pages,
    Part,
    Save,
    Seat,
    Step,
    StepOutput,
)
from tilewright.compiler.targets.interface.token_masks import Allowed
from tilewright.compiler.targets.program.instructions import Plan
from tilewright.distributed.peers import Peers

_NUM_ENDS = 16
"""End tokens of a seat that the device looks for; the host looks for the others."""


class CudaExecutable(Executable):
    """A compiled model on one GPU: one plan for prompts and decode steps.

    Tokens are chosen on the device, except where penalties, bias or log probabilities are asked
    for: these the host works out, which waits for the logits.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        options: CompileOptions,
        contract: NumericContract,
        device: torch.device,
        *,
        num_pages: int | None = None,
        copies: Kinds = NO_COPIES,
    ) -> None:
        """``num_pages``: that sequences share, None: whole contexts; ``copies``: held once more."""
        self.contract, self.vocab_size = contract, plan.vocab_size
        rows = decode_buckets(options.max_batch)
        num_pages = num_pages or options.max_batch * pages_of(options.max_context)
        self._state = PagedState(
            plan.states, options, device, num_pages=num_pages, sequence_specs=plan.sequence_states,
            num_marks=num_marks(plan, options),
        )  # fmt: skip
        reserved = copy_bytes(plan, copies)
        self.capabilities = capabilities_of(plan, options, device, num_pages, reserved)
        self.device, self._weights, self.dealt = device, weights, plan.dealt
        self._asked = options.parallel.exchange
        exact = options.compute == "exact"
        is_free = not (exact or options.is_strict or options.parallel.wire)
        prompt_wire = PROMPT_WIRE if is_free else None
        self._steps = Steps(
            plan, weights, self._state, max_rows=rows[-1], exact=exact, prompt_wire=prompt_wire,
            strict_rows=self.capabilities.max_invariant_rows, copies=copies,
        )  # fmt: skip
        self.notes = self._steps.copies.said(options.copies)
        if prompt_wire and options.parallel.tensor > 1:
            self.notes += (f"sums of prompts, and of rows beside them, travel in {prompt_wire}",)
        if device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(device)
            self.device_detail = f"{self.device_name}, {self._steps.kernels()}"
        self._table = SeatTable(options.max_batch, _NUM_ENDS, device)
        self._buckets = self._make_buckets(plan, rows, options)
        self._sittings: dict[Seat, Sitting] = {}
        self._away = Away(self._sittings, self._state, self._table)
        self._seated: Seated | None = None
        self._answers = Answers(
            self._table, self._sittings, leave=self._leave,
            width=lambda: self.num_choosable, num_seats=options.max_batch,
        )  # fmt: skip
        self._joined = Joined(
            self._steps, self._state, self._table, self._buckets, self._answers, self._sittings,
            check=self._check, leave=self._leave,
        )  # fmt: skip

    def _make_buckets(self, plan: Plan, rows: Sequence[int], options: CompileOptions) -> Buckets:
        return Buckets(
            self._steps,
            rows=rows,
            tokens=prompt_buckets(plan, options.parallel.tensor),
            num_choosable=lambda: self.num_choosable,
            table=self._table,
            passes=lambda: self.capabilities.passes,
            most_pieces=lambda: self.capabilities.max_prompts,
            prepared_rows=prepared_rows_of(plan, options),
        )

    def join(self, peers: Peers) -> None:
        group = meet(peers, self.dealt, self.device, asked=self._asked)
        self.notes = (*self.notes, *group.notes)
        self.unite(group)

    def unite(self, group: Group) -> None:
        """Make this executable's steps those of a rank of ``group``, before the first of them."""
        self._steps.group = self._answers.group = group

    @property
    def _group(self) -> Group | None:
        return self._steps.group

    @torch.no_grad()
    def step(self, step: Step) -> StepOutput:
        if self._group is not None:
            self._group.check()
        self._apply(step.edits)
        parts: list[Part] = []
        self._force(step)
        limits = self.capabilities
        shares = limits.shares_passes(len(self._sittings))
        riding = step.decode if shares and self._rides(step) else ()
        decodes = () if riding else self._buckets.cut(step.decode)
        batches, alone = split(
            step.prompts, limits.max_prompts if shares else 1,
            marks=limits.marks, most_rows=limits.most_shared, beside=bool(riding),
        )  # fmt: skip
        self._answers.begin(len(decodes) + len(batches) + len(alone))
        parts += [self._decode(seats, step) for seats in decodes]
        for index, batch in enumerate(batches):
            parts += self._joined.run(batch, step, () if index else riding)
        parts += [part for each in alone if (part := self._prompt(each, step)) is not None]
        return StepOutput(tuple(parts), is_mixed=bool(riding) and len(batches) == 1 and not alone)

    def _rides(self, step: Step) -> bool:
        """Whether the rows that decode take part in a batch of pieces of prompts: where all of
        these might end in a pass that is captured.
        """
        limits = self.capabilities
        if not (limits.passes and step.decode):
            return False
        most_rows = limits.most_shared
        joined = [each for each in step.prompts if can_join(each, limits.marks, most_rows)]
        if not joined:
            return False
        seats = (*step.decode, *(chunk.seat for chunk in step.prompts if chunk.chooses))
        num_rows = len(step.decode) + min(len(joined), limits.max_prompts)
        return num_rows <= limits.passes[-1][0] and self._answers.may_be_captured(seats, step)

    @torch.no_grad()
    def prepare(self) -> None:
        assert not self._sittings, "somebody is seated"
        limits, is_gpu = self.capabilities, self.device.type == "cuda"
        longest = min(limits.max_step_tokens, limits.max_context)
        with self._group.patiently() if self._group else contextlib.nullcontext():
            self._buckets.prepare(longest, runs_long=is_gpu)

    @property
    def is_prepared(self) -> bool:
        return self._buckets.is_prepared

    @torch.no_grad()
    def prepare_next(self) -> None:
        self._buckets.prepare_next()

    def reset(self) -> None:
        self._seated = None
        self._answers.forget()
        self._sittings.clear()
        self._away.forget()
        self._state.reset()

    def _apply(self, edits: Sequence[Edit]) -> None:
        """All edits in their order; those of tables and pages go to the device together."""
        if any(not isinstance(edit, Pages | Close) for edit in edits):
            self._leave()
        opened: dict[Seat, SamplingParams] = {}
        for edit in edits:
            if isinstance(edit, Open):
                assert edit.seat not in self._sittings, f"seat {edit.seat} is taken"
                assert 0 <= edit.seat < self.capabilities.max_seats, f"there is no {edit}"
                self._sittings[edit.seat] = Sitting(edit.sampling, edit.prompt, edit.keeps)
                opened[edit.seat] = edit.sampling
                self._answers.open(edit.seat, edit.sampling.stop_token_ids)
            elif isinstance(edit, Close):
                del self._sittings[edit.seat]
                self._answers.close(edit.seat)
                self._state.clear(edit.seat)
            elif isinstance(edit, Pages):
                self._state.note(edit)
            else:
                self._move(edit)
        self._state.deal([edit for edit in edits if isinstance(edit, Pages)])
        self._table.open(opened)

    def _move(self, edit: Edit) -> None:
        """Copies of state, within the device or to the host and back."""
        if isinstance(edit, Copy):
            self._state.copy(edit.source, edit.target, edit.num_positions)
            self._sittings[edit.target].length = edit.num_positions
        elif isinstance(edit, Save):
            self._state.save(edit.seat, edit.snapshot, self._sittings[edit.seat].length)
        elif isinstance(edit, Load):
            self._sittings[edit.seat].length = self._state.load(edit.seat, edit.snapshot)
        else:
            assert isinstance(edit, Out | Back | Drop), edit
            self._away.apply(edit)

    def agreed(self) -> bytes:
        self._leave()
        return self._table.agreed({seat: each.length for seat, each in self._sittings.items()})

    def _leave(self) -> None:
        """What the bucket that ran last holds of its seats goes back to the table."""
        if self._seated is not None:
            self._seated.settle(self._sittings)
            self._table.give_back(self._seated.at, self._seated.bucket.rows.tokens)
            self._seated = None

    def _force(self, step: Step) -> None:
        """Forced tokens into the table, where any are."""
        if not step.forced:
            return
        self._leave()
        self._table.put(list(step.forced), list(step.forced.values()))
        for seat, token in step.forced.items():
            self._sittings[seat].force(token)

    def _decode(self, seats: tuple[Seat, ...], step: Step) -> Part:
        """One token of each of up to as many seats as a bucket has rows."""
        if self._seated is None or self._seated.seats is not seats:
            self._leave()
            self._seated = self._sit(seats)
        seated = self._seated
        bucket = seated.bucket
        is_captured = not seated.is_late and self._answers.may_be_captured((), step)
        longest = seated.advance(self._state)
        bucket.run(longest, seated.drawing if is_captured and not step.masked else None)
        logits = bucket.logits[: len(seats)]
        if step.masked or not is_captured:
            seated.settle(self._sittings)
        if not is_captured:
            return self._answers.late(seats, logits, step)
        if step.masked:
            return self._answers.masked(seats, bucket, step, seated.drawing)
        return self._answers.chosen(seats, logits, bucket.choice, step)

    def _sit(self, seats: tuple[Seat, ...]) -> Seated:
        """Seats take the rows of the smallest bucket."""
        bucket = self._buckets.decode(len(seats))
        lengths = np.array([self._sittings[seat].length for seat in seats], dtype=np.int64)
        at = bucket.sit(self._table, seats, lengths)
        chosen = [self._sittings[seat].sampling for seat in seats]
        is_late = any(map(needs_host, chosen))
        return Seated(seats, bucket, at, drawing_of(chosen), is_late, lengths)

    def _check(self, chunk: Chunk) -> Sitting:
        """Who sits where a piece of a prompt belongs; no bucket holds its token any more."""
        if self._seated is not None and chunk.seat in self._seated.seats:
            self._leave()
        sitting = self._sittings[chunk.seat]
        assert chunk.start <= sitting.length, f"seat {chunk.seat}: {chunk.start} leaves a gap"
        self._state.check(chunk.seat, chunk.end)
        return sitting

    def _prompt(self, chunk: Chunk, step: Step) -> Part | None:
        """A piece of a prompt; None where nothing is wanted of it."""
        sitting = self._check(chunk)
        parts, found = cut(chunk, self.capabilities.marks), None
        assert len(parts) == 1 or not chunk.echoes, "a chunk that echoes is in one piece"
        pooled: list[Tensor] = []
        for part in parts:
            sitting.length, sitting.token = part.end, None
            if chunk.pools:
                rows, _ = one(part, self.device, self._state.marks((part,)))
                pooled.append(self._steps.pool(rows, from_start=part.start == 0))
            else:
                found = self._run_prompt(part, step)
            self._state.keep((part,))
        if chunk.pools:
            return self._answers.pooled(pooled, len(chunk.tokens))
        return found

    def _run_prompt(self, chunk: Chunk, step: Step) -> Part | None:
        """Captured where it is short, and at most its last token wants logits."""
        chosen = [self._sittings[seat].sampling for seat in (chunk.seat, *chunk.also)]
        is_late = self._answers.is_late((chunk.seat, *chunk.also), step)
        drawing = None if is_late else drawing_of(chosen)
        marks = self._state.marks((chunk,))
        if len(chunk.tokens) <= self._buckets.tokens[-1] and not chunk.echoes:
            bucket = self._buckets.prompt(len(chunk.tokens))
            choice = bucket.choice
            bucket.run(chunk, drawing, marks)
            logits = bucket.logits
        else:
            placed, wanted = one(chunk, self.device, marks)
            from_start = chunk.start == 0
            found = self._steps.prefill(placed, logit_rows=wanted, from_start=from_start)
            if found is None:
                return None
            logits = found
            of = (chunk.seat,), (chunk.end,), self.num_choosable, logits[-1:]
            choice = choose_now(self._table, *of, chosen if not is_late else (), self._group)
        return self._end_prompt(chunk, step, logits, choice, is_late)

    def _end_prompt(
        self, chunk: Chunk, step: Step, logits: Tensor, choice: Choice, is_late: bool
    ) -> Part | None:
        if not (chunk.chooses or chunk.echoes):
            return None
        seats = (chunk.seat, *chunk.also) if chunk.chooses else ()
        for seat in seats[1:]:
            self._state.copy(chunk.seat, seat, chunk.end)
            self._sittings[seat].length = chunk.end
        if is_late:
            return self._answers.late(seats, logits, step, chunk if chunk.echoes else None)
        if len(seats) > 1:
            ends = [chunk.end] * len(seats)
            chosen = [self._sittings[seat].sampling for seat in seats]
            logits_each, width = logits[-1:].repeat(len(seats), 1), self.num_choosable
            choice = choose_now(self._table, seats, ends, width, logits_each, chosen, self._group)
        for row, seat in enumerate(seats):
            self._table.hold(seat, choice.tokens[row : row + 1])
        return self._answers.chosen(seats, logits, choice, step)

    @torch.no_grad()
    def choose(self, output: StepOutput, allowed: Allowed) -> None:
        assert self._answers.is_waiting or not output.parts, "no choice waits"
        self._answers.choose(allowed)

    @torch.no_grad()
    def follow_choice(self) -> None:
        self._answers.choose(Allowed())

    @torch.no_grad()
    def chosen_experts(self, seats: Sequence[Seat], tokens: Sequence[int]) -> list[int]:
        """Read a token on each seat and count, layer by layer, the different experts chosen.

        For measurements: it is not captured, and chooses no tokens.
        """
        self._leave()
        lengths = [self._sittings[seat].length for seat in seats]
        rows = Rows(*torch.tensor([tokens, lengths, seats]).to(self.device))
        for seat in seats:
            self._sittings[seat].length += 1
        return self._steps.chosen_experts(rows)

    def memory(self) -> MemoryUse:
        copies = self._steps.copies.num_bytes
        return MemoryUse(self._weights.num_bytes + copies, self._state.num_bytes_held(), copies)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return self._state.num_bytes(num_positions, num_sequences)

    def close(self) -> None:
        self._seated = None
        group = self._group if "_steps" in vars(self) else None
        for name in ("_joined", "_buckets", "_steps", "_state", "_weights"):
            vars(self).pop(name, None)  # it may be closed twice
        if self.device.type == "cuda":
            gc.collect()  # a captured step and what it runs hold each other
        if group is not None:
            group.close()  # behind its graphs, which hold what it frees
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
