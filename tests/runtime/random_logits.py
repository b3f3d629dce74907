"""A host executable whose logits are random: of a row's whole history, and so the same anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.base import Capabilities, MemoryUse
from tilewright.compiler.targets.interface.step import (
    SampledTokens,
    SamplerOutput,
    Slot,
    Step,
    StepOutput,
)
from tilewright.compiler.targets.interface.token_masks import TokenMask
from tilewright.models.tokenizer.tokenizer import byte_of_character
from tilewright.runtime.grammar.matchers import Grammars

NUM_BYTES = 256
END, THINK, UNTHINK, NUM_TOKENS = 256, 257, 258, 259
VOCAB = 264
"""Logits a row: five more than there are tokens."""


def tokenizer_json() -> str:
    """A token a byte, an end token, and the marks of a think block."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    backend = Tokenizer(models.BPE({characters[byte]: byte for byte in range(NUM_BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<end>", "<think>", "</think>")]
    backend.add_special_tokens(special)
    return backend.to_str()


def grammars(end_tokens: tuple[int, ...] = (END,)) -> Grammars:
    """For that tokenizer."""
    return Grammars(tokenizer_json, end_tokens=end_tokens, vocab_size=VOCAB)


def text_of(tokens: list[int]) -> str:
    """What an answer says, marks and ends apart."""
    return bytes(token for token in tokens if token < NUM_BYTES).decode()


class RandomLogits(HostExecutable):
    """``log`` says what was run and when tokens were chosen."""

    vocab_size = VOCAB

    def __init__(self, **capabilities: Any) -> None:
        super().__init__()
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_context": 4096, "max_prompts": 4}
        self.capabilities = Capabilities(**{**limits, **capabilities})
        self.contract = NumericContract((), ())
        self._held: dict[Slot, list[int]] = {}
        self.log: list[str] = []
        self._num_steps = 0

    def step(self, step: Step) -> StepOutput:
        number, self._num_steps = self._num_steps, self._num_steps + 1
        self.log.append(f"launch {number}")
        parts = super().step(step).parts
        return StepOutput(tuple(replace(part, read=self._logged(part, number)) for part in parts))

    def _logged(self, part: SamplerOutput, number: int) -> Callable[[], SampledTokens]:
        def read() -> SampledTokens:
            self.log.append(f"read {number}")
            return part.read()

        return read

    def choose(self, output: StepOutput, allowed: TokenMask) -> None:
        self.log.append(f"choose {self._num_steps - 1}")
        super().choose(output, allowed)

    def forward(self, batch: Batch) -> np.ndarray:
        rows, cuts = [], batch.cu_seqlens.tolist()
        for slot, first, last in zip(batch.slots, cuts, cuts[1:], strict=False):
            held = self._held.setdefault(slot, [])
            for token, position in zip(
                batch.tokens[first:last].tolist(),
                batch.positions[first:last].tolist(),
                strict=True,
            ):
                del held[position:]
                held.append(token)
                rows.append(self._logits(held))
        return np.stack(rows)[batch.logit_rows]

    def _logits(self, held: list[int]) -> np.ndarray:
        found = np.random.default_rng(zlib.crc32(repr(held).encode())).normal(0, 4, VOCAB)
        return found.astype(np.float32)

    def clear_state(self, slot: Slot) -> None:
        self._held.pop(slot, None)

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        self._held[target] = self._held[source][:num_positions]

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return 0
