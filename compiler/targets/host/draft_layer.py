"""`DraftLayer`: drafts from a model's own draft layer, for host executables.

The layer reads a token and the model's hidden state before the token. Excludes acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.interface.step import Slot

if TYPE_CHECKING:
    from tilewright.compiler.targets.host.executable import HostExecutable

_MAX_PENDING = 16
"""Maximum tokens of a slot outside the layer's state."""


@dataclass(slots=True)
class _PendingDraftRows:
    """A slot's rows. Token s is at position s - 1, with the hidden state of s - 1.

    Attributes:
        end: Positions in the model's state.
        tokens: Tokens before ``end`` outside the layer's state.
        hidden: Their hidden states.
        last: Hidden state of position ``end - 1``.
        drafted: Token at ``end`` inside the layer's state. None: no token.
    """

    last: np.ndarray
    end: int = 0
    tokens: list[int] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    drafted: int | None = None

    def truncate(self, end: int) -> None:
        """Discard positions from ``end``. An unknown hidden state becomes zero."""
        num_left = len(self.tokens) - (self.end - end)
        is_known = 0 <= num_left < len(self.tokens)
        self.last = self.hidden[num_left] if is_known else np.zeros_like(self.last)
        num_left = num_left if is_known else 0
        del self.tokens[num_left:], self.hidden[num_left:]
        self.end, self.drafted = end, None


class DraftLayer:
    """Drafts tokens for a model's slots.

    Wrong rows make wrong drafts, and the model verifies every draft. Hence an unknown hidden state
    may be zero.
    """

    def __init__(self, executable: HostExecutable) -> None:
        executable.keeps_hidden = True
        self.executable = executable
        self._slots: dict[Slot, _PendingDraftRows] = {}

    def note(
        self, slot: Slot, start: int, tokens: Sequence[int] | np.ndarray, hidden: np.ndarray
    ) -> None:
        """Take the tokens that the model has read from ``start``, and their hidden states."""
        if slot not in self._slots:
            self._slots[slot] = _PendingDraftRows(np.zeros_like(hidden[0]))
        rows = self._slots[slot]
        if start != rows.end:
            rows.truncate(start)
        first = int(start == 0 or tokens[0] == rows.drafted)
        rows.tokens += [int(token) for token in tokens[first:]]
        rows.hidden += [rows.last, *hidden[:-1].copy()][first:]
        rows.last, rows.end, rows.drafted = hidden[-1].copy(), start + len(tokens), None
        if len(rows.tokens) > _MAX_PENDING:
            self._flush(slot, rows)

    def copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        """Copy a slot's first positions to another slot."""
        rows = self._slots.get(source)
        if rows is None:
            return
        self.executable.copy_state(source, target, max(0, num_positions - 1))
        copied = _PendingDraftRows(rows.last, rows.end, [*rows.tokens], [*rows.hidden])
        if num_positions != rows.end:
            copied.truncate(num_positions)
        self._slots[target] = copied

    def close(self, slot: Slot) -> None:
        """Discard a slot."""
        if self._slots.pop(slot, None) is not None:
            self.executable.clear_state(slot)

    def propose(
        self, counts: Mapping[Slot, int], tokens: Mapping[Slot, int], num_choosable: int
    ) -> dict[Slot, list[int]]:
        """Return up to ``counts`` tokens after the next ``tokens`` of slots.

        A draft ends before logits that are not numbers.
        """
        drafts: dict[Slot, list[int]] = {slot: [] for slot in counts}
        lines: dict[Slot, tuple[int, list[int], list[np.ndarray]]] = {}
        for slot in counts:
            rows = self._slots.get(slot)
            if rows is None or not rows.end:
                continue
            start = rows.end - 1 - len(rows.tokens)
            lines[slot] = start, [*rows.tokens, tokens[slot]], [*rows.hidden, rows.last]
            rows.tokens, rows.hidden, rows.drafted = [], [], tokens[slot]
        while lines:
            logits, hidden = self._run(lines, decodes=True)
            following: dict[Slot, tuple[int, list[int], list[np.ndarray]]] = {}
            for index, (slot, (start, line, _)) in enumerate(lines.items()):
                values = logits[index, :num_choosable]
                if np.isnan(values).any():
                    continue
                drafts[slot].append(int(values.argmax()))
                if len(drafts[slot]) < counts[slot]:
                    following[slot] = start + len(line), drafts[slot][-1:], [hidden[index]]
            lines = following
        return drafts

    def _flush(self, slot: Slot, rows: _PendingDraftRows) -> None:
        start = rows.end - 1 - len(rows.tokens)
        self._run({slot: (start, rows.tokens, rows.hidden)}, decodes=False)
        rows.tokens, rows.hidden = [], []

    def _run(
        self, lines: Mapping[Slot, tuple[int, list[int], list[np.ndarray]]], *, decodes: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run rows. Return logits and hidden states for the last tokens of slots."""
        bounds = np.cumsum([0, *(len(tokens) for _, tokens, _ in lines.values())])
        ranges = [np.arange(start, start + len(tokens)) for start, tokens, _ in lines.values()]
        last = bounds[1:] - 1
        batch = Batch(
            tokens=np.array([token for _, tokens, _ in lines.values() for token in tokens]),
            positions=np.concatenate(ranges),
            cu_seqlens=bounds,
            logit_rows=last if decodes else last[:0],
            slots=tuple(lines),
            decodes=decodes,
            hidden=np.stack([state for _, _, hidden in lines.values() for state in hidden]),
        )
        logits = self.executable.forward(batch)
        return logits, self.executable.last_hidden[last]

    def reset(self) -> None:
        """Discard all slots."""
        for slot in list(self._slots):
            self.close(slot)
