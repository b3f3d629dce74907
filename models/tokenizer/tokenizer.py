"""Text to token ids and back, whole or as a stream, and chat messages to text.

It does not know containers (see vocabulary*.py) nor models; built on the `tokenizers` library.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import decoders

from tilewright.errors import CheckpointError, RequestError, allowed
from tilewright.models.tokenizer.chat_template import ChatTemplate, Message
from tilewright.models.tokenizer.mapped import mapped_bytes
from tilewright.models.tokenizer.mapped_backend import MappedBackend
from tilewright.models.tokenizer.vocabulary import (
    Vocabulary,
    library_errors,
    write_folder,
)

_BYTE_LEVEL = ("ByteLevel",)
_PIECES = ("Replace", "ByteFallback", "Fuse")
_STRIPPED_PIECES = (*_PIECES, "Strip")
_DECODERS = (_BYTE_LEVEL, _PIECES, _STRIPPED_PIECES)
_UNSTRIPPED = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
)
_MOST_KNOWN = 1 << 15
"""Tokens whose bytes are kept once they were asked for: 4 MB; most texts have no more."""


class Tokenizer:
    """One checkpoint's tokenizer; ids equal those of transformers for the same files.

    Raises:
        CheckpointError: a decoder whose tokens are not bytes, or an end id outside the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._steps = _decoder_steps(vocabulary)
        self._added = self._backend.get_added_tokens_decoder()
        self.known_bytes: dict[int, bytes] = {}
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids: tuple[int, ...] = vocabulary.eos_ids
        self.bos_id: int | None = self._named_id("bos_token")
        self._eos_id = self._named_id("eos_token")
        self._template: ChatTemplate | None = None
        if vocabulary.chat_template is not None:
            self._template = ChatTemplate(vocabulary.chat_template, str(vocabulary.where))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self._template is not None

    @property
    def num_ids(self) -> int:
        """Ids from here on have no token; models may have logits for them all the same."""
        if isinstance(self._backend, MappedBackend):
            return self._backend.num_ids
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out with ``skip_special``."""
        return frozenset(index for index, token in self._added.items() if token.special)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it become their ids.

        With ``add_special`` the ids that the checkpoint puts around a text (bos ...) are added.

        Raises:
            RequestError: text that is not valid Unicode (a lone surrogate), or that a corrupt
                tokenizer fails on.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text at character {error.start} has the lone surrogate "
                f"U+{ord(text[error.start]):04X}; allowed: valid Unicode"
            ) from None
        parts = self._vocabulary
        by_backend = add_special and parts.add_bos is None and parts.add_eos is None
        with library_errors(RequestError, f"{parts.where}: the tokenizer fails on this text"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=by_backend).ids
        if by_backend:
            return ids
        if add_special and parts.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and parts.add_eos and self._eos_id is not None:
            ids = [*ids, self._eos_id]
        return ids

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, *, after: Iterable[int] = ()
    ) -> str:
        """Decode ``ids`` to text; bytes that are not UTF-8 become U+FFFD, unused ids nothing.

        ``after``: ids of the text before, whose continuation is decoded. A SentencePiece text
        loses its first space. A continuation keeps it.

        Raises:
            RequestError: an id that is not a whole number from 0.
        """
        listed = [self.checked_id(index) for index in ids]
        skipped = self.special_ids if skip_special else frozenset()
        with library_errors(RequestError, f"{self._vocabulary.where}: decoding fails"):
            if self.strips_first_space and self._has_text(after, skipped):
                tokens = [self._backend.id_to_token(index) for index in listed]
                kept = [t for i, t in zip(listed, tokens, strict=True) if t and i not in skipped]
                continued: str = _UNSTRIPPED.decode(kept)
                return continued
            text: str = self._backend.decode(listed, skip_special_tokens=skip_special)
        return text

    def token_bytes(self, index: int) -> bytes:
        """The bytes token ``index`` adds to a text; empty for an id that the vocabulary lacks."""
        number = self.checked_id(index)
        found = self.known_bytes.get(number)
        if found is None:
            found = self._bytes_of(number)
            if len(self.known_bytes) < _MOST_KNOWN:
                self.known_bytes[number] = found
        return found

    def _bytes_of(self, number: int) -> bytes:
        token = self._backend.id_to_token(number)
        if token is None:
            return b""
        if self._steps == _BYTE_LEVEL:
            table = byte_of_character()
            try:
                return bytes(table[character] for character in token)
            except KeyError:
                return token.encode("utf-8")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode("utf-8")

    def stream(
        self,
        skip_special: bool = True,
        *,
        shown: Collection[str] = (),
        after: Iterable[int] = (),
    ) -> StreamDecoder:
        """A decoder for ids that come one at a time.

        With ``skip_special`` it leaves special tokens out, all but those whose text is ``shown``.
        ``after``: as in `decode`.
        """
        skipped = self.special_ids if skip_special else frozenset()
        kept = {self._backend.token_to_id(token) for token in shown}
        begins = self.strips_first_space and not self._has_text(after, skipped)
        return StreamDecoder(self, skipped - kept, begins_text=begins)

    def _has_text(self, ids: Iterable[int], skipped: frozenset[int]) -> bool:
        """Whether decoding ``ids`` gives any text."""
        return any(index not in skipped and self.token_bytes(index) for index in ids)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        must_read: bool = True,
    ) -> str:
        """The prompt text of a chat; encode it without ``add_special``.

        ``tools``, ``variables`` and ``must_read``: see `ChatTemplate.render`.

        Raises:
            RequestError: the checkpoint has no chat template, or it fails on these messages or
                leaves their text out.
        """
        if self._template is None:
            raise RequestError(f"{self._vocabulary.where}: the tokenizer has no chat template")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._vocabulary.special_tokens,
            tools=tools,
            variables=variables,
            must_read=must_read,
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._template is None else self._template.source

    def content_hash(self) -> str:
        """SHA-256 over vocabulary, pipeline, added and named tokens, and chat template."""
        parts = self._vocabulary
        digest = hashlib.sha256(self._backend.to_str().encode("utf-8"))
        rest = (sorted(parts.special_tokens.items()), list(parts.eos_ids))
        flags = (parts.chat_template, parts.add_bos, parts.add_eos)
        digest.update(json.dumps([rest, flags]).encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files of which `load_tokenizer` makes this tokenizer again, of equal hash.

        Raises:
            CheckpointError: a folder that is not new or empty, or cannot be written.
        """
        write_folder(self._vocabulary, folder)

    @property
    def is_mapped(self) -> bool:
        """Whether it comes from a file of `mapped_bytes`, which then costs no work."""
        return isinstance(self._backend, MappedBackend)

    def mapped_bytes(self) -> bytes:
        """The file of which `tilewright.models.tokenizer.load.load_mapped` makes it again, fast."""
        return mapped_bytes(self._vocabulary)

    def checked_id(self, index: int) -> int:
        """``index`` as a plain int, whatever kind of whole number it is.

        Raises:
            RequestError: it is not a whole number from 0.
        """
        try:
            number = -1 if isinstance(index, bool) else operator.index(index)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 32:
            raise RequestError(f"token id {index!r}; allowed: 0 to {self.vocab_size - 1}")
        return number

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops one space at the very beginning of a text."""
        return self._steps == _STRIPPED_PIECES

    def _named_id(self, name: str) -> int | None:
        token = self._vocabulary.special_tokens.get(name)
        index: int | None = None if token is None else self._backend.token_to_id(token)
        return index


class StreamDecoder:
    """Decodes ids as they come; what it has returned never changes.

    A character is returned when its last byte has come. The pieces joined are the text that
    `Tokenizer.decode` gives, for every sequence of ids whose bytes are UTF-8.
    """

    __slots__ = ("_at_start", "_skipped", "_tokenizer", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int] = frozenset(), *, begins_text: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = begins_text

    def push(self, index: int) -> str:
        """The text that is certain now that ``index`` has come; often empty."""
        return self.push_all((index,))

    def push_all(self, ids: Iterable[int]) -> str:
        """Push each of ``ids`` in turn; returns the joined text."""
        tokenizer, skipped, found = self._tokenizer, self._skipped, []
        known = tokenizer.known_bytes
        for index in ids:
            number = index if type(index) is int else tokenizer.checked_id(index)
            if number not in skipped:
                raw = known.get(number)
                found.append(tokenizer.token_bytes(number) if raw is None else raw)
        return self._emit(b"".join(found), final=False)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that never became a character."""
        return self._emit(b"", final=True)

    def _emit(self, raw: bytes, final: bool) -> str:
        text = self._utf8.decode(raw, final)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text


def _decoder_steps(vocabulary: Vocabulary) -> tuple[str, ...]:
    """The kinds of decoder in a row; those known here map each token to bytes on its own."""
    decoder = vocabulary.backend.decoder
    state: dict[str, Any] = {"type": "none"}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
    members: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    steps = tuple(str(member["type"]) for member in members)
    plain = all(_is_plain(member) for member in members)
    if steps not in _DECODERS or not plain:
        names = [" + ".join(known) for known in _DECODERS]
        raise CheckpointError(
            f"{vocabulary.where}: tokenizer decoder {' + '.join(steps)} is not read; "
            + allowed(names)
        )
    return steps


def _is_plain(member: dict[str, object]) -> bool:
    """Whether a Replace or Strip is SentencePiece's own."""
    if member["type"] == "Replace":
        return member.get("pattern") == {"String": "▁"} and member.get("content") == " "
    if member["type"] == "Strip":
        return (member.get("content"), member.get("start"), member.get("stop")) == (" ", 1, 0)
    return True


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Map GPT-2's alphabet to bytes: Latin-1 that prints is itself, the rest is from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
