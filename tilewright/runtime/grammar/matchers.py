"""Grammars compiled for a vocabulary with llguidance: an output's allowed next tokens.

Invalid user input raises an error here and never crashes. The library's limits are set, its
recursion has enough stack (:func:`roomy_threads`), and a grammar is tried before acceptance.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.errors import ConfigError, RequestError
from tilewright.runtime.grammar.annotations import without_annotations
from tilewright.runtime.grammar.spec import CHOICE, JSON_SCHEMA, LARK, REGEX, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 256 << 10
"""Maximum size of a schema, expression or grammar in bytes."""

_MAX_LARK_LINES = 4096
_STACK_BYTES = 256 << 20  # the library recurses with the rule depth
_NUM_KEPT = 16
_NUM_TRIED = 3  # tokens; oversized grammars fail on the first
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Whitespace as in common JSON. Unlimited whitespace could prevent an end.
_SPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,20}"
_KINDS = (JSON_SCHEMA, REGEX, CHOICE, LARK)


def roomy_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return threads with large stacks for compiling and using grammars."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        started = threading.Barrier(count + 1)
        for _ in range(count):
            pool.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(before)
    return pool


class Grammars:
    """Makes matchers for a tokenizer, which is loaded on first use.

    Args:
        read: Returns the tokenizer as JSON for the tokenizers library.
        end_tokens: The model's end tokens.
        vocab_size: The logits' width.
    """

    def __init__(
        self, read: Callable[[], str], *, end_tokens: Sequence[int], vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self._read, self._ends = read, tuple(end_tokens)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._made: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def load(self) -> LLTokenizer:
        """Return the vocabulary in the library's form. The first call takes up to seconds.

        Raises:
            ConfigError: The library is missing or rejects the tokenizer.
        """
        with self._lock:
            if self._tokens is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError:
                    said = "grammars need llguidance; allowed: installed with tilewright[serve]"
                    raise ConfigError(said) from None
                ends = list(self._ends) or None  # the library needs an end token and accepts any
                try:
                    self._tokens = LLTokenizer(
                        self._read(), n_vocab=self.vocab_size, eos_token=ends
                    )
                except ValueError as error:
                    raise ConfigError(f"grammars for this tokenizer: {error}") from None
            return self._tokens

    def prepare(self) -> None:
        """Load the vocabulary early, if the library is installed.

        Loading holds Python's lock, so it should happen before requests arrive.
        """
        with suppress(ConfigError):  # raised again on first use of a grammar
            self.load()

    def check(self, spec: GrammarSpec) -> None:
        """Raise RequestError for a grammar that cannot be compiled or run, with the library's
        message.
        """
        tried = self._compiled(spec).deep_copy()
        is_empty = True
        for _ in range(_NUM_TRIED):
            bits = tried.compute_bitmask()
            _refuse_error(tried)
            if tried.is_stopped():
                break
            if not any(bits):
                raise RequestError(f"{spec.kind}: no text obeys it; allowed: one that can be met")
            tried.consume_token(_last(bits))
            _refuse_error(tried)
            is_empty = False
        if is_empty:
            raise RequestError(f"{spec.kind}: only an answer without text obeys it; allowed: some")

    def matcher(self, spec: GrammarSpec, end_tokens: Sequence[int]) -> Matcher:
        """Return a matcher for an empty output. ``end_tokens`` may finish the output.

        Raises:
            RequestError: See :meth:`check`.
        """
        return Matcher(spec, self._compiled(spec).deep_copy(), self.load(), end_tokens=end_tokens)

    def _compiled(self, spec: GrammarSpec) -> LLMatcher:
        key = spec.kind, spec.text
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = self._compile(spec)
        made.compute_bitmask()  # the first mask is slow, and its work is reused
        with self._lock:
            self._made[key] = made
            while len(self._made) > _NUM_KEPT:
                self._made.popitem(last=False)
        return made

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        tokens = self.load()
        from llguidance import LLMatcher, LLParserLimits

        made = LLMatcher(
            tokens, _source(spec), log_level=0, limits=LLParserLimits(**_LIMITS)
        )  # it raises nothing
        _refuse_error(made)
        return made


def grammars_of(folder: Path, end_tokens: Sequence[int], vocab_size: int) -> Grammars:
    """Return the grammars for a tokenizer saved in a directory. The first use reads the
    tokenizer.
    """

    def read() -> str:
        return (folder / "tokenizer.json").read_text(encoding="utf-8")

    return Grammars(read, end_tokens=end_tokens, vocab_size=vocab_size)


class Matcher:
    """The state of an output in its grammar. Only one thread may use it at a time.

    Attributes:
        end_tokens: Tokens that may finish the output after the grammar is met.
        error: Reason for a failed matcher, else empty.
    """

    def __init__(
        self,
        spec: GrammarSpec,
        matcher: LLMatcher,
        tokens: LLTokenizer,
        *,
        end_tokens: Sequence[int],
    ) -> None:
        self.end_tokens, self.error = tuple(end_tokens), ""
        self.model_ends = tuple(tokens.eos_tokens)
        self._matcher, self._tokens = matcher, tokens
        self._mark, self._opener = spec.behind.encode(), spec.opener
        self._is_free = bool(self._mark) and self._opener is None
        self._heard = b""
        self._num_followed = 0

    @property
    def opener(self) -> int | None:
        """Return a token allowed at the first position in addition to the grammar, or None."""
        return self._opener if not self._num_followed and not self._is_free else None

    @property
    def is_free(self) -> bool:
        """Return whether the grammar has not begun."""
        return self._is_free

    @property
    def is_met(self) -> bool:
        """Return whether the grammar is satisfied, so that the output may end here."""
        return not self._is_free and not self.error and self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Return whether only an end token may follow."""
        return self.is_met and self._matcher.is_stopped()

    def follow(self, output: Sequence[int]) -> None:
        """Consume the new tokens in ``output``. An end token must be last."""
        for token in output[self._num_followed :]:
            if not self.error:
                self._take(token)
            self._num_followed += 1

    def write_bits(self, words: np.ndarray) -> None:
        """Write a bit for each allowed next token into a row of `TokenMask`.

        If the grammar is met, end tokens are included. Other threads may run concurrently.
        """
        assert words.dtype == np.uint32 and words.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._note_error()

    def _take(self, token: int) -> None:
        if self._is_free:
            self._accept(token)
        elif token == self.opener:
            self._is_free = True
        elif token not in self.end_tokens and not self._matcher.consume_token(token):
            self._note_error()

    def _accept(self, token: int) -> None:
        """Consume a token before the grammar. It may complete the mark and contain further text."""
        heard = self._heard + self._tokens.decode_bytes([token])
        at = heard.find(self._mark)
        if at < 0:
            self._heard = heard[-len(self._mark) :]
            return
        self._is_free = False
        rest = heard[at + len(self._mark) :].lstrip()
        if rest and not self._matcher.consume_tokens(self._tokens.tokenize_bytes(rest)):
            self._note_error()

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = " ".join(self._matcher.get_error().split()) or "the grammar has ended"


def _source(spec: GrammarSpec) -> str:
    """Return a grammar in the library's form.

    Raises:
        RequestError: The grammar is rejected without the library.
    """
    from llguidance import LLMatcher

    assert spec.kind in _KINDS, spec.kind
    size = len(spec.text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise RequestError(f"{spec.kind}: {size} bytes; allowed: up to {MAX_BYTES}")
    try:
        spec.text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{spec.kind}: lone surrogates; allowed: valid Unicode") from None
    if spec.kind == JSON_SCHEMA:
        try:
            return LLMatcher.grammar_from_json_schema(
                without_annotations(spec.text), overrides={"whitespace_pattern": _SPACE}
            )
        except ValueError as error:
            raise RequestError(f"json_schema: {error}") from None
    if spec.kind == REGEX:
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == CHOICE:
        texts = [json.dumps(load, ensure_ascii=False) for load in json.loads(spec.text)]
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
    if "::=" in spec.text:
        raise RequestError("grammar: this is GBNF; allowed: Lark, which writes `rule: ...`")
    if (count := len(spec.text.splitlines())) > _MAX_LARK_LINES:
        raise RequestError(f"grammar: {count} lines; allowed: up to {_MAX_LARK_LINES}")
    return LLMatcher.grammar_from_lark(spec.text)


def _refuse_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(" ".join(matcher.get_error().replace("<non-verbose/>", "").split()))


def _last(bits: bytes) -> int:
    """Return the highest allowed token."""
    at = max(index for index, byte in enumerate(bits) if byte)
    return 8 * at + bits[at].bit_length() - 1
