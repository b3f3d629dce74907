"""A single choice of a response: tokens in, text deltas and log probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.runtime.messages import NewTokens, RequestFinished, RequestStarted
from tilewright.runtime.request import EngineRequest
from tilewright.serve.output.reasoning import AnswerDelta, ReasoningSplitter, joined
from tilewright.serve.output.stops import StopMatcher
from tilewright.serve.output.tool_calls import CallReader, ToolCall
from tilewright.serve.prompt.texts import Decoder, TextCoder

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log probabilities.

    Attributes:
        token: token id.
        scores: log probabilities. None for a prompt's first token.
        offset: the answer's characters before the token, negative in the prompt.
    """

    token: int
    scores: LogProbs | None
    offset: int


@dataclass(slots=True)
class ChoiceStream:
    """Follows a single answer from its first token to its end.

    Attributes:
        request: Engine request of the answer. The tracker gives it a number.
        reader: finds tool calls in the content. None without tools.
        echo: The prompt's text if the answer repeats it.
        tokens: token ids up to the token that completed a stop string.
        finish_reason: ``stop``, ``length`` or ``tool_calls`` at the end, else None.
        stop_reason: the stop string or the stop id that ended the answer.
        finished: times of the engine, or of this process after a stop string.
        num_draft_tokens, num_accepted_tokens: Verified draft tokens, and the accepted ones.
    """

    coder: TextCoder
    request: EngineRequest
    matcher: StopMatcher
    splitter: ReasoningSplitter
    reader: CallReader | None = None
    keeps_end: bool = False
    echo: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    num_reasoning: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    started: RequestStarted | None = None
    finished: RequestFinished | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    _num_characters: int = 0
    _decoder: Decoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = self.coder.stream(after=self.request.prompt)

    def show(self, tokens: Sequence[str]) -> None:
        """Decode special tokens as text. Call before the first token."""
        assert not self.tokens
        self._decoder = self.coder.stream(shown=tokens, after=self.request.prompt)

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls of the answer."""
        return self.reader.calls if self.reader is not None else []

    @property
    def awaits_echo(self) -> bool:
        """Return whether `score_prompt` must precede the next `push`."""
        return self._scores_prompt and not self.tokens

    @property
    def _scores_prompt(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def _is_plain(self) -> bool:
        """Return whether all text is content, without stop strings, tools and think blocks."""
        is_watched = self.reader is not None or self.matcher.has_stops
        return not is_watched and self.splitter.is_done

    def push(self, message: NewTokens) -> AnswerDelta:
        """Return the text that is certain. Set ``finish_reason`` at a stop string or a call."""
        self.num_draft_tokens = message.num_draft_tokens
        self.num_accepted_tokens = message.num_accepted_tokens
        if self._is_plain and not message.logprobs:
            return self._push_plain(message.tokens)
        deltas = [AnswerDelta()]
        for at, token in enumerate(message.tokens):
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            is_end = token in self.request.sampling.stop_token_ids
            text = "" if is_end and not self.keeps_end else self._decoder.push(token)
            if message.logprobs and (self._scores_prompt or not is_end):
                self.scored.append(Scored(token, message.logprobs[at], self._num_characters))
            self._num_characters += len(text)
            deltas.append(self._split(self.matcher.push(text)))
            if self.matcher.found is not None:
                self.stop_reason = self.matcher.found
                deltas.append(self._finish(STOP))
            elif self.reader is not None and self.reader.is_full:
                deltas.append(self._finish(STOP))
            elif is_end and token not in self.coder.eos_ids:
                self.stop_reason = token
        return self._kept(deltas)

    def _push_plain(self, tokens: Sequence[int]) -> AnswerDelta:
        """Push tokens of a plain answer, the most frequent case."""
        self.tokens += tokens
        said: Sequence[int] = tokens
        ends = self.request.sampling.stop_token_ids
        for token in tokens:
            if token in ends:
                said = tokens if self.keeps_end else [each for each in tokens if each not in ends]
                if token not in self.coder.eos_ids:
                    self.stop_reason = token
        text = self._decoder.push_all(said)
        self._num_characters += len(text)
        self.content += text
        return AnswerDelta(content=text)

    def end(self, reason: str) -> AnswerDelta:
        """Return the delayed text after the engine has finished the answer."""
        if self.finish_reason is not None:
            return AnswerDelta()
        last = self.matcher.push(self._decoder.flush())
        piece = self._split(last + self.matcher.flush())
        self.stop_reason = self.matcher.found or self.stop_reason
        return self._kept([piece, self._finish(STOP if self.matcher.found is not None else reason)])

    def score_prompt(self, echo: Sequence[LogProbs]) -> None:
        """Put the prompt's scores before the answer's. Slow for long prompts."""
        decoder = self.coder.stream(skip_special=False)
        lengths = [len(decoder.push(token)) for token in self.request.prompt]
        offset = -sum(lengths) - len(decoder.flush())
        for token, length, scores in zip(self.request.prompt, lengths, (None, *echo), strict=True):
            self.scored.append(Scored(token, scores, offset))
            offset += length

    def _split(self, text: str) -> AnswerDelta:
        piece = self.splitter.push(text)
        self.num_reasoning += self.splitter.is_inside
        return self._read(piece)

    def _read(self, piece: AnswerDelta) -> AnswerDelta:
        """Return the delta with its tool calls separated from its content."""
        if self.reader is None or not piece.content:
            return piece
        return joined([AnswerDelta(piece.reasoning), self.reader.push(piece.content)])

    def _finish(self, reason: str) -> AnswerDelta:
        """Return the delayed text. Complete calls set the reason ``tool_calls``."""
        rest = [self._read(self.splitter.flush())]
        if self.reader is not None:
            rest.append(self.reader.flush())
            if reason == STOP and self.reader.is_whole:
                reason = TOOL_CALLS
        self.finish_reason = reason
        return joined(rest)

    def _kept(self, pieces: Sequence[AnswerDelta]) -> AnswerDelta:
        piece = joined(pieces)
        self.reasoning += piece.reasoning
        self.content += piece.content
        return piece


def token_text(coder: TextCoder, token: int) -> str:
    """Return a single token as text. Incomplete characters become U+FFFD."""
    return coder.token_bytes(token).decode("utf-8", errors="replace")


def _named(coder: TextCoder, token: int) -> str:
    """Return a token as a unique key of a table. Incomplete characters become hex bytes."""
    raw = coder.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _floored(value: float) -> float:
    return max(value, -9999.0)


def chat_logprobs(coder: TextCoder, scored: Sequence[Scored], num_top: int) -> dict[str, object]:
    """Return log probabilities for chats: ``content[{token, logprob, bytes, top_logprobs}]``."""

    def entry(token: int, value: float) -> dict[str, object]:
        raw = coder.token_bytes(token)
        text = raw.decode("utf-8", errors="replace")
        return {"token": text, "logprob": _floored(value), "bytes": list(raw)}

    content = []
    for each in scored:
        assert each.scores is not None, "chats have no echo"
        top = [entry(token, value) for token, value in each.scores.top[:num_top]]
        content.append({**entry(each.token, each.scores.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def legacy_logprobs(
    coder: TextCoder, scored: Sequence[Scored], num_top: int, *, offset: int
) -> dict[str, object]:
    """Return log probabilities for completions: parallel lists, null for a first prompt token.

    ``offset`` is the echo's character count.
    """

    def best(scores: LogProbs) -> dict[str, float]:
        top = reversed(scores.top[:num_top])
        return {_named(coder, token): _floored(value) for token, value in top}

    scores = [each.scores for each in scored]
    return {
        "tokens": [_named(coder, each.token) for each in scored],
        "token_logprobs": [None if score is None else _floored(score.chosen) for score in scores],
        "top_logprobs": [None if score is None else best(score) for score in scores],
        "text_offset": [max(0, offset + each.offset) for each in scored],
    }
