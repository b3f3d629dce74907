"""`TaskMaker`: from HTTP bodies to tasks, for the API server and offline batches.

Knows no engine and no HTTP connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from tilewright.images.decode import ImageLimits
from tilewright.images.fetch import MediaHosts
from tilewright.images.processor import PreparedImage
from tilewright.images.squares import expand_markers
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.runtime.messages import EngineReady
from tilewright.serve.prompt.images import chat_has_images, prepare_images, with_images
from tilewright.serve.prompt.prepare import TokenizedPrompt, check_prompt, encode, render_chat
from tilewright.serve.prompt.structured import behind_reasoning, read_grammar
from tilewright.serve.prompt.template import TemplateFacts
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tasks import Served, make_task, read_calls, template_variables
from tilewright.serve.tools.grammars import call_grammar
from tilewright.serve.tools.tool_request import RequestedTools, read_tools
from tilewright.serve.web.errors import ApiError, unsupported
from tilewright.serve.web.requests import (
    ChatRequest,
    Common,
    CompletionRequest,
    TemplateRequest,
    TokenizeRequest,
    check_chat,
    check_common,
)
from tilewright.serve.web.responses import CompletionTask

_CHARACTERS_A_TOKEN = 4  # about
_LONG = 1 << 20
"""Size for :meth:`TaskMaker.aside` to use a thread."""

_T = TypeVar("_T")


class TaskMaker(ABC):
    """Makes jobs. Subclasses know the model, and run slow functions in threads or at once.

    Attributes:
        image_limits: Limits for a request's images.
        media_hosts: Image URL hosts. None: such URLs are refused.
        template: Chat template facts.
        template_variables: Chat template variables. A request may replace them.
    """

    image_limits: ImageLimits = ImageLimits()
    media_hosts: MediaHosts | None = None
    template: TemplateFacts
    template_variables: Mapping[str, Any]

    @abstractmethod
    def up(self) -> tuple[EngineReady, TextCoder]:
        """Return engine limits and tokenizer, or raise ApiError if the engine is down."""

    @abstractmethod
    def served(self, request: Common, num_prompts: int) -> Served:
        """Return the model for a request with ``num_prompts`` prompts, or raise ApiError."""

    def check_model(self, model: str | None, ready: EngineReady) -> None:  # noqa: B027 (any name)
        """Refuse another model name with an ApiError. The default allows any name."""

    @abstractmethod
    async def check_grammar(self, spec: GrammarSpec, param: str) -> None:
        """Compile a grammar within the time limit, or raise ApiError."""

    @abstractmethod
    async def aside(self, size: int, function: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """Run a function, in a thread if ``size`` characters are many."""

    async def with_images(self, function: Callable[..., _T], *values: Any, **named: Any) -> _T:
        """Run a function that fetches or decodes images, in a thread."""
        return await self.aside(_LONG, function, *values, **named)

    async def chat_job(self, request: ChatRequest) -> CompletionTask:
        """Return the job for a chat.

        Raises:
            ApiError: The server cannot serve the request.
        """
        check_chat(request)
        ready, coder = self.up()
        self.check_model(request.model, ready)
        tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        prompt = await self.chat_prompt(
            request,
            tools,
            effort=request.reasoning_effort,
            continues=bool(request.continue_final_message),
        )
        text = prompt.text
        check_prompt(prompt, ready, "messages")
        grammar, unconstrained = await self.checked_grammar(request), ""
        if tools is not None:
            grammar, unconstrained = await self._call_grammar(tools, text, grammar)
        elif grammar is not None:
            grammar = behind_reasoning(grammar, text, coder)
        job = make_task(self.served(request, 1), request, [prompt], grammar)
        job.unconstrained = unconstrained
        if tools is not None:
            read_calls(job, tools, self.template.calls)
        return job

    async def chat_prompt(
        self, request: ChatRequest | TokenizeRequest, tools: RequestedTools | None, **how: Any
    ) -> TokenizedPrompt:
        """Return a chat in token ids, with its images. ``how``: see `render`.

        Raises:
            ApiError: The template or an image is refused.
        """
        ready, coder = self.up()
        messages, images = request.messages or [], list[PreparedImage]()
        if chat_has_images(messages):
            messages, images = await prepare_images(
                messages, ready.images, self.image_limits, self.with_images, self.media_hosts
            )
            request = msgspec.structs.replace(request, messages=messages)
        text = await self.render(request, tools, **how)
        text = expand_markers(text, ready.images) if images else text
        prompt = await self.aside(len(text), encode, coder, text, ready, add_special=False)
        if images:
            assert ready.images is not None
            prompt = with_images(prompt, images, ready.images)
        return prompt

    async def _call_grammar(
        self, tools: RequestedTools, prompt: str, otherwise: GrammarSpec | None
    ) -> tuple[GrammarSpec | None, str]:
        """Return the grammar for calls, or the reason for none.

        Raises:
            ApiError: The request needs a grammar, and there is none.
        """
        _, coder = self.up()
        form = self.template.calls
        spec = call_grammar(tools, form, coder, prompt=prompt, otherwise=otherwise)
        if spec is None:
            return None, f"{form.name} has no marker of calls"
        try:
            await self.check_grammar(spec, "tools")
        except ApiError as error:
            if tools.must_call or otherwise is not None or any(t.is_strict for t in tools.tools):
                raise
            return None, error.message
        return spec, ""

    async def render(
        self,
        request: ChatRequest | TemplateRequest | TokenizeRequest,
        tools: RequestedTools | None = None,
        *,
        effort: str | None = None,
        continues: bool = False,
    ) -> str:
        """Return the chat as text; see `render_chat`. ``effort``: reasoning effort."""
        _, coder = self.up()
        kwargs = request.chat_template_kwargs
        return await self.aside(
            _LONG,
            render_chat,
            coder,
            request.messages or (),
            facts=self.template,
            tools=tools,
            variables=template_variables(self.template_variables, kwargs, effort),
            continues=continues,
            opens=request.add_generation_prompt is not False,
        )

    async def completion_job(self, request: CompletionRequest) -> CompletionTask:
        """Return the job for a completion.

        Raises:
            ApiError: The server cannot serve the request.
        """
        check_common(request)
        ready, coder = self.up()
        self.check_model(request.model, ready)
        if request.suffix:
            raise unsupported("suffix", "text is only continued at its end")
        prompts = []
        for given in request.prompts():
            if isinstance(given, str):
                prompt = await self.aside(len(given), encode, coder, given, ready, add_special=True)
            else:
                prompt = TokenizedPrompt("", tuple(given))
            check_prompt(prompt, ready, "prompt")
            if request.echo and not isinstance(given, str):
                size = _CHARACTERS_A_TOKEN * len(given)
                prompt = replace(prompt, text=await self.aside(size, coder.decode, given))
            prompts.append(prompt)
        grammar = await self.checked_grammar(request)
        return make_task(self.served(request, len(prompts)), request, prompts, grammar)

    async def checked_grammar(self, request: Common) -> GrammarSpec | None:
        """Return a grammar after it compiled. None: the output is any text.

        Raises:
            ApiError: The grammar does not compile.
        """
        grammar = read_grammar(request)
        if grammar is None:
            return None
        await self.check_grammar(*grammar)
        return grammar[0]
