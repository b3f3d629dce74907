"""What the server asks of a tokenizer, and how long texts are kept from its event loop."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol


class Decoder(Protocol):
    """Makes text of ids that come one at a time; what it has returned never changes."""

    def push(self, index: int) -> str:
        """Take more token ids and return the text that they make certain."""

    def push_all(self, ids: Iterable[int]) -> str:
        """Push each of ``ids`` in turn; returns the joined text."""

    def flush(self) -> str:
        """Return the text that was held back, now that no more ids come."""


class TextCoder(Protocol):
    """A checkpoint's tokenizer. Its methods raise `RequestError` for what they cannot do."""

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
        """The bytes a token adds to a text."""

    def stream(
        self,
        skip_special: bool = True,
        *,
        shown: Collection[str] = (),
        after: Iterable[int] = (),
    ) -> Decoder:
        """A decoder for one answer.

        ``shown``: special tokens that it does not leave out. ``after``: token ids of the prompt.
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
        """Render the messages of a chat as the text of a prompt. ``must_read``: refuse text that
        the template leaves out.
        """
