"""Random operations on the native cpu backend: every row has the bits of a single run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from tests.targets.cpu.native.test_native_mixers import small
from tests.targets.test_conformance import EXACT, assert_near
from tests.tiny import compiled, precision_of, prefill, random_tokens
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    CloseSlot,
    CopyState,
    LoadState,
    OpenSlot,
    PrefillChunk,
    SaveState,
    Slot,
    StateSnapshot,
    Step,
)

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

NUM_TOKENS, NUM_SLOTS, NUM_SNAPSHOTS = 40, 12, 8


class Operations:
    """Slots with known sequences. ``rows`` [sequence][position] are the logits of single runs."""

    def __init__(self, executable: Executable, sequences: list[list[int]], seed: int) -> None:
        self.executable, self.sequences = executable, sequences
        self.rows = [prefill(executable, tokens) for tokens in sequences]
        self.random = random.Random(seed)
        self.slots: dict[Slot, tuple[int, int]] = {}  # the sequence and its stored positions
        self.snapshots: dict[StateSnapshot, tuple[int, int]] = {}
        self.num_done = 0

    def run(self, count: int) -> None:
        """Run random operations: a decoded token, a chunk, or a state update."""
        chosen = (self.decode, self.prompt, self.open, self.close, self.copy, self.save, self.load)
        while self.num_done < count:
            self.random.choices(chosen, (8, 6, 3, 1, 1, 1, 2))[0]()

    def some(self, least: int = 0, most: int = NUM_TOKENS) -> list[Slot]:
        """Return slots with enough positions, in random order."""
        found = [slot for slot, (_, held) in self.slots.items() if least <= held < most]
        return self.random.sample(found, len(found))

    def free(self) -> Slot | None:
        found = [Slot(at) for at in range(NUM_SLOTS) if at not in self.slots]
        return self.random.choice(found) if found else None

    def step(self, expected: Sequence[torch.Tensor], **given: object) -> None:
        output = self.executable.step(Step(want_logits=True, **given))  # type: ignore[arg-type]
        for part, rows in zip(output.parts, expected, strict=True):
            assert part.logits is not None and torch.equal(part.logits(), rows)
        self.num_done += sum(map(len, expected)) or 1

    def piece(self) -> tuple[PrefillChunk, torch.Tensor] | None:
        """Return the next chunk for a slot."""
        for slot in self.some()[:1]:
            sequence, held = self.slots[slot]
            end = self.random.randint(held + 1, NUM_TOKENS)
            echoes = self.random.random() < 0.5
            tokens = tuple(self.sequences[sequence][held:end])
            self.slots[slot] = sequence, end
            rows = self.rows[sequence][held:end] if echoes else self.rows[sequence][end - 1 : end]
            return PrefillChunk(slot, held, tokens, chooses=not echoes, echoes=echoes), rows
        return None

    def prompt(self) -> None:
        found = self.piece()
        if found is not None:
            self.step([found[1]], prompts=(found[0],))

    def decode(self) -> None:
        """Decode some slots, optionally with a chunk."""
        piece = self.piece() if self.random.random() < 0.2 else None
        able = [s for s in self.some(1) if piece is None or s != piece[0].slot]
        if not able:
            return None if piece is None else self.step([piece[1]], prompts=(piece[0],))
        forced, rows = {}, []
        for slot in able[: self.random.randint(1, len(able))]:
            sequence, held = self.slots[slot]
            forced[slot] = self.sequences[sequence][held]
            rows.append(self.rows[sequence][held])
            self.slots[slot] = sequence, held + 1
        expected = [torch.stack(rows), *([piece[1]] if piece else [])]
        prompts = (piece[0],) if piece else ()
        return self.step(expected, decode=tuple(forced), forced=forced, prompts=prompts)

    def open(self) -> None:
        slot = self.free()
        if slot is not None:
            self.step([], edits=(OpenSlot(slot, SamplingParams()),))
            self.slots[slot] = self.random.randrange(len(self.sequences)), 0

    def close(self) -> None:
        for slot in self.some(0, NUM_TOKENS + 1)[:1]:
            self.step([], edits=(CloseSlot(slot),))
            del self.slots[slot]

    def copy(self) -> None:
        """Copy a whole history, because its state is at the end."""
        slot = self.free()
        for source in self.some(1)[:1] if slot is not None else ():
            assert slot is not None
            edits = OpenSlot(slot, SamplingParams()), CopyState(source, slot, self.slots[source][1])
            self.step([], edits=edits)
            self.slots[slot] = self.slots[source]

    def save(self) -> None:
        for slot in self.some(1)[:1]:
            snapshot = StateSnapshot(self.random.randrange(NUM_SNAPSHOTS))
            self.step([], edits=(SaveState(slot, snapshot),))
            self.snapshots[snapshot] = self.slots[slot]

    def load(self) -> None:
        """Load a snapshot after a prefix of a longer history."""
        slot, known = self.free(), list(self.snapshots.items())
        if slot is None or not known:
            return
        snapshot, (sequence, held) = self.random.choice(known)
        for source in self.some(held, NUM_TOKENS + 1):
            if self.slots[source][0] == sequence:
                copy = CopyState(source, slot, held)
                self.step(
                    [], edits=(OpenSlot(slot, SamplingParams()), copy, LoadState(slot, snapshot))
                )
                self.slots[slot] = sequence, held
                return


@pytest.mark.parametrize(
    "count", [4000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("fidelity", ["exact", "lofi"])
def test_random_operations_have_the_bits_of_rows_alone(count: int, fidelity: str) -> None:
    """Experts, linear attention and attention in a single model."""
    model = small("qwen3_5_moe")
    sequences = [random_tokens(NUM_TOKENS, seed=seed) for seed in range(6)]
    if fidelity == "exact":
        precision, compute = precision_of("bf16"), "exact"
    else:
        precision, compute = precision_of("bfp4", "lofi", kv_cache="bfp8"), "fast"
    made = {"precision": precision, "compute": compute, "max_batch": NUM_SLOTS, "num_threads": 2}
    executable = compiled(model, "cpu-native", **made)
    operations = Operations(executable, sequences, seed=count)
    if fidelity == "exact":
        reference = compiled(model, precision=precision)
        for tokens, rows in zip(sequences, operations.rows, strict=True):
            assert_near(rows, prefill(reference, tokens), EXACT)
    operations.run(count)
    executable.close()
