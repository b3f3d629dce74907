"""Class `LLM`: opens a model, compiles it through the cache, and generates text.

Knows text, messages and answers. The runtime knows slots, pages and steps.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, overload

from tilewright.api import compile, load, open_draft_model
from tilewright.compiler.sampling.params import sampling_of
from tilewright.compiler.targets.interface.base import Executable, Progress
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.errors import RequestError, allowed
from tilewright.images.decode import ImageLimits
from tilewright.images.parts import has_images, take_images
from tilewright.images.prompt import PromptImage, insert_images
from tilewright.images.squares import expand_markers
from tilewright.loading.source import ModelHandle
from tilewright.models.tokenizer.chat_template import Message
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.options.config_file import read_config_file
from tilewright.options.engine_config import LOCAL, EngineConfig
from tilewright.options.resolve import resolve
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.pooling import MEAN, POOLINGS, Pooling, normalized
from tilewright.runtime.request import FAILED
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.runtime.speculative.config import draft_note
from tilewright.runtime.speculative.draft_model import DraftModel
from tilewright.utils.status_line import StatusLine

if TYPE_CHECKING:
    import numpy as np

MAX_TOKENS = 512
"""Default maximum number of output tokens, if the context has capacity."""

Chat = Sequence[Message]
"""Messages in order, each with ``role`` (system, user, assistant) and ``content``.

Content is a text, or a list of parts: ``{"type": "text", "text": ...}`` and ``{"type": "image",
"image": ...}`` with a Pillow image or a path.
"""

_Prompt = tuple[tuple[int, ...], tuple[PromptImage, ...]]
"""Token ids, and the images in them."""

Chats = Sequence[str | Chat]
"""Several chats. A chat with a single question may be a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer. ``str()`` returns its text.

    Attributes:
        text: the answer without special tokens and the end token.
        tokens: its token ids, with the end token.
        finish_reason: ``stop`` at an end token, ``length`` at ``max_tokens``, or ``cancelled``.
        num_prompt_tokens: prompt tokens.
        num_cached_tokens: prompt tokens from the prefix cache.
        num_draft_tokens, num_accepted_tokens: Verified draft tokens, and the accepted ones.
        first_s: seconds from the request to the first token.
        total_s: seconds from the request to the last token.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    first_s: float
    total_s: float
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first token. None for a single token."""
        seconds = self.total_s - self.first_s
        return (len(self.tokens) - 1) / seconds if len(self.tokens) > 1 and seconds > 0 else None


class AnswerStream(Iterator[str]):
    """Iterates over an answer's text while it is generated.

    `close`, or the end of a ``with`` block, ends an unfinished request.
    """

    def __init__(self, request: RequestState, pieces: Iterator[str], tokenizer: Tokenizer) -> None:
        self._request, self._pieces, self._tokenizer = request, pieces, tokenizer

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        """The answer so far, complete at the stream's end.

        Raises:
            RequestError: if the model's logits are no numbers.
        """
        return _answer(self._request, self._tokenizer)

    def close(self) -> None:
        """End an unfinished request."""
        getattr(self._pieces, "close", lambda: None)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LLM:
    """A model that answers: ``LLM("smollm2").chat("Why is the sky blue?")``.

    Compiled programs come from the cache, and prompts share computed prefixes. Several prompts run
    as a batch. Every method takes the fields of
    :class:`tilewright.compiler.sampling.params.SamplingParams` as keywords (``temperature``,
    ``top_p``, ``max_tokens``, ``seed`` ...). The default of ``stop_token_ids`` is the model's end
    tokens. The default of ``max_tokens`` is 512, or the free context if it is smaller.
    ``speculative=False`` disables drafts for a call.

    Args:
        model: a directory, a file, a name on the Hugging Face hub, ``shape:NAME``, or a directory
            of ``tilewright compile``. None: the default model.
        config: a YAML file of options, or an `EngineConfig`. A keyword replaces its value.
        progress: receives ``(what, done, total)`` during compilation. None: standard error has a
            line about slow work.
        options: fields of `EngineConfig`, for example ``target``, ``precision``, ``max_num_seqs``
            (default: 8), ``max_model_len`` and ``tensor_parallel_size``.

    Raises:
        TilewrightError: for an unknown or unreadable model, or for options that do not fit together
            or this machine.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: str | Path | EngineConfig | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        values = options if model is None else {"model": model, **options}
        if isinstance(config, EngineConfig):
            made = EngineConfig.of(values, asdict(config))
        else:
            from_file = {} if config is None else read_config_file(config)
            made = EngineConfig.of(values, {**LOCAL, **from_file})
        resolved = resolve(made)
        status = StatusLine()
        report = progress or status.progress
        try:
            how: Any = {"use_cache": made.use_cache, "progress": report}
            source = load(resolved.path, config=resolved, **how)
            draft = open_draft_model(source, resolved, progress=report)
            compiled = compile(source, resolved, progress=report)
        finally:
            status.clear()
        for note in source.notes:
            warnings.warn(note, stacklevel=2)
        self._begin(source, compiled, made, draft)

    @classmethod
    def of_compiled(
        cls,
        source: ModelHandle,
        compiled: Compiled,
        config: EngineConfig,
        draft: Executable | None = None,
    ) -> Self:
        """Make an LLM from a compiled model, and from its draft model."""
        made = cls.__new__(cls)
        made._begin(source, compiled, config, draft)
        return made

    def _begin(
        self,
        source: ModelHandle,
        compiled: Compiled,
        config: EngineConfig,
        draft: Executable | None,
    ) -> None:
        self.source, self.compiled = source, compiled
        self.tokenizer = source.tokenizer
        policy = config.scheduler_config(cache_output=False)
        note = draft_note(policy.speculative, compiled.executable.capabilities)
        if note is not None:
            warnings.warn(note, stacklevel=3)
        self._draft_model = None if draft is None else DraftModel(draft)
        self._loop = EngineLoop(compiled.executable, policy=policy, draft_model=self._draft_model)
        self._numbers = itertools.count()

    @property
    def max_context(self) -> int:
        """Maximum positions in a sequence, prompt and answer together."""
        return self.compiled.executable.capabilities.max_context

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Answer: ...

    @overload
    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Answer]: ...

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> Answer | list[Answer]:
        """Continue a text or a text batch, without the chat template.

        Raises:
            RequestError: for a text above the context, or parameters out of range.
        """
        if isinstance(prompts, str):
            return self._run([self._plain(prompts)], sampling)[0]
        return self._run([self._plain(prompt) for prompt in prompts], sampling)

    @overload
    def chat(self, messages: str | Chat, **sampling: Any) -> Answer: ...

    @overload
    def chat(self, messages: Chats, **sampling: Any) -> list[Answer]: ...

    def chat(self, messages: str | Chat | Chats, **sampling: Any) -> Answer | list[Answer]:
        """Answer a question or a chat with the chat template, or a chat batch.

        Raises:
            RequestError: for a model without a chat template, unsupported messages, a chat above
                the context, or parameters out of range.
        """
        if isinstance(messages, str) or not messages or isinstance(messages[0], Mapping):
            one = cast("str | Chat", messages)
            return self._run([self._of_chat(one)], sampling)[0]
        return self._run([self._of_chat(each) for each in cast("Chats", messages)], sampling)

    def stream(self, prompt: str, **sampling: Any) -> AnswerStream:
        """Stream `generate` for a single prompt."""
        return self._stream(self._plain(prompt), sampling)

    def stream_chat(self, messages: str | Chat, **sampling: Any) -> AnswerStream:
        """Stream `chat` for a single chat."""
        return self._stream(self._of_chat(messages), sampling)

    def stream_tokens(
        self, prompt: Sequence[int], images: Sequence[PromptImage] = (), **sampling: Any
    ) -> AnswerStream:
        """Stream the answer to token ids. ``images``: images in the prompt."""
        if images and self.compiled.executable.encoder is None:
            raise self._no_images()
        return self._stream((tuple(prompt), tuple(images)), sampling)

    def embed(
        self, texts: str | Sequence[str], *, pooling: str = MEAN, dimensions: int | None = None
    ) -> np.ndarray:
        """Return vectors of length 1: float32 ``[hidden]`` for a text, ``[N, hidden]`` for several.

        Args:
            pooling: ``mean`` of all positions, or the ``last`` position.
            dimensions: First value count to keep. None: all.

        Raises:
            RequestError: for an empty text, a text that does not fit the context, arguments out of
                range, or a target without hidden states.
        """
        import numpy as np

        width = self.compiled.executable.capabilities.hidden_size
        if pooling not in POOLINGS:
            raise RequestError(f"pooling {pooling!r}; {allowed(POOLINGS, pooling)}")
        if dimensions is not None and not 1 <= dimensions <= width:
            raise RequestError(f"dimensions {dimensions}; allowed: 1 to {width}")
        several = [texts] if isinstance(texts, str) else list(texts)
        if "" in several:
            raise RequestError(f"text {several.index('')} is empty; allowed: at least a character")
        requests = [
            RequestState(next(self._numbers), self._plain(text)[0], pooling=Pooling(pooling))
            for text in several
        ]
        self._loop.generate(requests)
        vectors = np.empty((len(requests), dimensions or width), np.float32)
        for index, request in enumerate(requests):
            if request.finish_reason == FAILED:
                raise RequestError(request.error)
            assert request.pooling is not None and request.pooling.vector is not None
            vectors[index] = normalized(request.pooling.vector[:dimensions])
        return vectors[0] if isinstance(texts, str) else vectors

    def close(self) -> None:
        """Release the model."""
        if self._draft_model is not None:
            self._draft_model.close()
        self.compiled.executable.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _plain(self, text: str) -> _Prompt:
        return tuple(self.tokenizer.encode(text, add_special=True)), ()

    def _of_chat(self, messages: str | Chat) -> _Prompt:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if has_images(messages):
            return self._of_images(messages)
        return tuple(self.tokenizer.encode(self.tokenizer.apply_chat_template(messages))), ()

    def _of_images(self, messages: Chat) -> _Prompt:
        encoder = self.compiled.executable.encoder
        if encoder is None:
            raise self._no_images()
        processor = encoder.settings.processor
        chat, images = take_images(messages, ImageLimits(), processor.prepare, is_local=True)
        text = expand_markers(self.tokenizer.apply_chat_template(chat), processor)
        return insert_images(self.tokenizer.encode(text), images, processor.image_token)

    def _no_images(self) -> RequestError:
        """Return the refusal of images, with the names of model and target."""
        target, mesh = self.compiled.target, self.compiled.executable.mesh
        if mesh != "1x1":
            target = f"{target} ({mesh} devices)"
        return RequestError(
            f"images: {self.source.name} on target {target} takes text only; allowed: text"
        )

    def _run(self, prompts: Iterable[_Prompt], values: Mapping[str, Any]) -> list[Answer]:
        requests = [self._request(prompt, values) for prompt in prompts]
        self._loop.generate(requests)
        return [_answer(request, self.tokenizer) for request in requests]

    def _stream(self, prompt: _Prompt, values: Mapping[str, Any]) -> AnswerStream:
        request = self._request(prompt, values)
        self._loop.check(request)
        return AnswerStream(request, self._pieces(request), self.tokenizer)

    def _request(self, request: _Prompt, values: Mapping[str, Any]) -> RequestState:
        prompt, images = request
        room = max(1, self.max_context - len(prompt) + 1)
        defaults = {"max_tokens": min(MAX_TOKENS, room), "stop_token_ids": self.tokenizer.eos_ids}
        has_drafts = values.get("speculative", True)
        if not isinstance(has_drafts, bool):
            raise RequestError(f"speculative {has_drafts!r}; allowed: True, False")
        values = {name: value for name, value in values.items() if name != "speculative"}
        sampling = sampling_of(values, defaults, caller_names=("speculative",))
        number = next(self._numbers)
        return RequestState(number, prompt, sampling, images=images, has_drafts=has_drafts)

    def _pieces(self, request: RequestState) -> Iterator[str]:
        decoder, seen = self.tokenizer.stream(after=request.prompt), 0
        self._loop.add(request)
        try:
            while request.finish_reason is None or seen < len(request.output):
                if seen == len(request.output):
                    self._loop.step()
                tokens, seen = request.text_tokens(seen), len(request.output)
                for token in tokens:
                    if piece := decoder.push(token):
                        yield piece
            if request.finish_reason == FAILED:
                raise RequestError(request.error)
            if piece := decoder.flush():
                yield piece
        finally:
            if request.finish_reason is None:
                self._loop.cancel(request)


def _answer(request: RequestState, tokenizer: Tokenizer) -> Answer:
    if request.finish_reason == FAILED:
        raise RequestError(request.error)
    times = request.token_times or [request.arrived_at]
    return Answer(
        text=tokenizer.decode(request.text_tokens(), after=request.prompt),
        tokens=tuple(request.output),
        finish_reason=request.finish_reason or "",
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=request.num_cached,
        first_s=times[0] - request.arrived_at,
        total_s=times[-1] - request.arrived_at,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )
