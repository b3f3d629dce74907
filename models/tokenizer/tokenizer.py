"""Conversion of text to token ids and back, whole or streamed, and of chat messages to text.

It uses the `tokenizers` library. See vocabulary*.py for containers.
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
"""Maximum number of cached tokens: 4 MB. Most texts need fewer."""


class Tokenizer:
    """A checkpoint's tokenizer. Its ids equal transformers' ids for the same files.

    Raises:
        CheckpointError: The decoder's tokens are not bytes, or an end id is outside the vocabulary.
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
        """Return whether `apply_chat_template` can be used."""
        return self._template is not None

    @property
    def num_ids(self) -> int:
        """Return the id count with tokens. Models may have logits for larger ids."""
        if isinstance(self._backend, MappedBackend):
            return self._backend.num_ids
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def tokens_hash(self) -> str:
        """Return the SHA-256 over the tokens by id."""
        digest = hashlib.sha256()
        for index in range(self.num_ids):
            digest.update(repr(self._backend.id_to_token(index)).encode())
        return digest.hexdigest()

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids omitted by ``skip_special``."""
        return frozenset(index for index, token in self._added.items() if token.special)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Return the token ids of ``text``. Special tokens in the text become their ids.

        ``add_special`` adds the checkpoint's ids around a text (bos ...).

        Raises:
            RequestError: The text is not valid Unicode (a lone surrogate), or a corrupt tokenizer
                fails.
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
        """Decode ``ids`` to text. Bytes outside UTF-8 become U+FFFD, and unused ids become nothing.

        ``after`` has the preceding text's ids. A SentencePiece text loses its first space. A
        continuation keeps it.

        Raises:
            RequestError: An id is not a whole number from 0.
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
        """Return the bytes of token ``index``. Unknown ids have none."""
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
        """Return a decoder for an id stream.

        ``skip_special`` omits special tokens, except those with a text in ``shown``. ``after`` is
        as in `decode`.
        """
        skipped = self.special_ids if skip_special else frozenset()
        kept = {self._backend.token_to_id(token) for token in shown}
        begins = self.strips_first_space and not self._has_text(after, skipped)
        return StreamDecoder(self, skipped - kept, begins_text=begins)

    def _has_text(self, ids: Iterable[int], skipped: frozenset[int]) -> bool:
        """Return whether decoding ``ids`` gives any text."""
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
        """Return a chat's prompt text. Encode it without ``add_special``.

        See `ChatTemplate.render` for ``tools``, ``variables`` and ``must_read``.

        Raises:
            RequestError: The checkpoint has no chat template, or the template fails or omits text.
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
        """Return the chat template's source, or None."""
        return None if self._template is None else self._template.source

    def content_hash(self) -> str:
        """Return the SHA-256 over vocabulary, pipeline, added and named tokens, and chat
        template.
        """
        parts = self._vocabulary
        digest = hashlib.sha256(self._backend.to_str().encode("utf-8"))
        rest = (sorted(parts.special_tokens.items()), list(parts.eos_ids))
        flags = (parts.chat_template, parts.add_bos, parts.add_eos)
        digest.update(json.dumps([rest, flags]).encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write files for `load_tokenizer`. The loaded tokenizer has an equal hash.

        Raises:
            CheckpointError: The directory is not new or empty, or cannot be written.
        """
        write_folder(self._vocabulary, folder)

    @property
    def is_mapped(self) -> bool:
        """Return whether the tokenizer is from a `mapped_bytes` file. `mapped_bytes` is then
        free.
        """
        return isinstance(self._backend, MappedBackend)

    def mapped_bytes(self) -> bytes:
        """Return a file for `tilewright.models.tokenizer.load.load_mapped`, which loads fast."""
        return mapped_bytes(self._vocabulary)

    def checked_id(self, index: int) -> int:
        """Return ``index`` as a plain int.

        Raises:
            RequestError: It is not a whole number from 0.
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
        """Return whether decoding drops a space at a text's start."""
        return self._steps == _STRIPPED_PIECES

    def _named_id(self, name: str) -> int | None:
        token = self._vocabulary.special_tokens.get(name)
        index: int | None = None if token is None else self._backend.token_to_id(token)
        return index


class StreamDecoder:
    """Decodes an id stream. Returned text never changes.

    A character is returned after its last byte. The joined results equal `Tokenizer.decode` for all
    ids with valid UTF-8.
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
        """Return the text that ``index`` completes. It is often empty."""
        return self.push_all((index,))

    def push_all(self, ids: Iterable[int]) -> str:
        """Push all ``ids`` in order. Return the joined text."""
        tokenizer, skipped, found = self._tokenizer, self._skipped, []
        known = tokenizer.known_bytes
        for index in ids:
            number = index if type(index) is int else tokenizer.checked_id(index)
            if number not in skipped:
                raw = known.get(number)
                found.append(tokenizer.token_bytes(number) if raw is None else raw)
        return self._emit(b"".join(found), final=False)

    def flush(self) -> str:
        """Return the remaining text: U+FFFD for incomplete characters."""
        return self._emit(b"", final=True)

    def _emit(self, raw: bytes, final: bool) -> str:
        text = self._utf8.decode(raw, final)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text


def _decoder_steps(vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the decoder types in order. Known types map each token to bytes separately."""
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
    """Return whether a Replace or Strip step is SentencePiece's own."""
    if member["type"] == "Replace":
        return member.get("pattern") == {"String": "▁"} and member.get("content") == " "
    if member["type"] == "Strip":
        return (member.get("content"), member.get("start"), member.get("stop")) == (" ", 1, 0)
    return True


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Map GPT-2's alphabet to bytes. Printable Latin-1 maps to itself, the rest starts at
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
