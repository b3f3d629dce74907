"""Steps of several prompts' pieces, or with rows that ride along: captured where they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import choose_now
from tilewright.compiler.targets.cuda.outputs.sampled_tokens import Answers
from tilewright.compiler.targets.cuda.outputs.sampling_batch import drawing_of
from tilewright.compiler.targets.cuda.state.ragged import join, num_tokens_of
from tilewright.compiler.targets.cuda.state.slot_table import SeatTable
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.steps.run import Steps
from tilewright.compiler.targets.host.executable import Sitting
from tilewright.compiler.targets.interface.step import Chunk, Part, Seat, Step


class Joined:
    """Runs pieces of several prompts as one batch, for an executable. ``check`` finds who sits
    where a piece belongs; ``leave`` takes back what a bucket holds of its seats.
    """

    def __init__(
        self,
        steps: Steps,
        state: PagedState,
        table: SeatTable,
        buckets: Buckets,
        answers: Answers,
        sittings: Mapping[Seat, Sitting],
        *,
        check: Callable[[Chunk], Sitting],
        leave: Callable[[], None],
    ) -> None:
        self._steps, self._state, self._table = steps, state, table
        self._buckets, self._answers, self._sittings = buckets, answers, sittings
        self._check, self._leave = check, leave

    def run(self, chunks: Sequence[Chunk], step: Step, riding: tuple[Seat, ...] = ()) -> list[Part]:
        """Pieces of prompts, and a token of seats that decode, in one batch; what is chosen."""
        for chunk in chunks:
            sitting = self._check(chunk)
            sitting.length, sitting.token = chunk.end, None
        held = self._go_on(riding)
        ends = {seat: at + 1 for seat, at in held.items()}
        ends |= {chunk.seat: chunk.end for chunk in chunks if chunk.chooses}
        may_be_captured = self._answers.may_be_captured(tuple(ends), step)
        found = self._buckets.batch(num_tokens_of(chunks), len(ends)) if may_be_captured else None
        if found is None:
            return self._uncaptured(chunks, step, held, ends)
        bucket, size = found
        drawing = drawing_of([self._sittings[seat].sampling for seat in ends])
        now = None if step.masked else drawing
        bucket.run(size, chunks, held, ends, now, self._state.marks(chunks))
        self._state.keep(chunks)
        seats = tuple(ends)
        if not seats:
            return []
        if step.masked:
            return [self._answers.masked(seats, bucket, step, drawing)]
        return [self._answers.chosen(seats, bucket.logits[: len(seats)], bucket.choice, step)]

    def _uncaptured(
        self, chunks: Sequence[Chunk], step: Step, held: dict[Seat, int], ends: dict[Seat, int]
    ) -> list[Part]:
        """A batch that is larger than those captured, or whose tokens are chosen late."""
        riding = tuple(held)
        ragged = join(
            chunks,
            self._table.device,
            seats=riding,
            positions=tuple(held.values()),
            marks=self._state.marks(chunks),
        )
        if riding:
            ragged.take_tokens(self._table.tokens)
        logits = self._steps.prefill(
            ragged.rows,
            logit_rows=ragged.last if ends else None,
            starts=ragged.starts,
            block=ragged.block,
            riding=ragged.riding,
        )
        self._state.keep(chunks)
        if logits is None:
            return []
        seats = tuple(ends)
        chosen = [self._sittings[seat].sampling for seat in seats]
        if self._answers.is_late(seats, step):
            return [self._answers.late(seats, logits, step)]
        at, width = [*ends.values()], self._answers.num_choosable
        choice = choose_now(self._table, seats, at, width, logits, chosen, self._steps.group)
        self._table.give_back(self._table.index(seats), choice.tokens)
        return [self._answers.chosen(seats, logits, choice, step)]

    def _go_on(self, seats: tuple[Seat, ...]) -> dict[Seat, int]:
        """Each seat has one position more, outside of a bucket; where their tokens stand."""
        if not seats:
            return {}
        self._leave()
        held = [self._sittings[seat].length for seat in seats]
        self._state.check_all(seats, np.array(held) + 1)
        for seat, at in zip(seats, held, strict=True):
            self._sittings[seat].length = at + 1
        return dict(zip(seats, held, strict=True))
