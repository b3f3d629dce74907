"""Tokenizer protocols for the server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol


class Decoder(Protocol):
    """A decoder for token ids. Returned text never changes."""

    def push(self, index: int) -> str:
        """Take a token id and return the text that is certain."""

    def push_all(self, ids: Iterable[int]) -> str:
        """Push each id. Return the joined text."""

    def flush(self) -> str:
        """Return the delayed text after the last id."""


class TextCoder(Protocol):
    """A tokenizer. Its methods raise `RequestError` for unsupported input."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, or None."""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Encode a text as token ids."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode token ids as text."""

    def token_bytes(self, index: int) -> bytes:
        """Return a token's bytes in a text."""

    def stream(
        self,
        skip_special: bool = True,
        *,
        shown: Collection[str] = (),
        after: Iterable[int] = (),
    ) -> Decoder:
        """Return a decoder for an answer.

        ``shown`` special tokens are decoded as text. ``after`` has the prompt's token ids.
        """

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        must_read: bool = True,
    ) -> str:
        """Render a chat's messages as a prompt's text.

        ``must_read`` raises for text that the template drops.
        """
