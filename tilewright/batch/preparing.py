"""From a row's body to a job, as the server's front makes it, but at once and without waiting."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tilewright.batch.records import Item
from tilewright.errors import ConfigError, RequestError
from tilewright.runtime.grammar.matchers import Grammars, roomy_threads
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.serve.jobs import Served, make_job, read_calls, template_variables
from tilewright.serve.prompt.prepare import Prompt, check_prompt, encode, render_chat
from tilewright.serve.prompt.structured import SECONDS, behind_reasoning, read_grammar
from tilewright.serve.prompt.template import TemplateFacts
from tilewright.serve.tools.asked import ToolsAsked, read_tools
from tilewright.serve.tools.grammars import call_grammar
from tilewright.serve.web.errors import ApiError, invalid, refuse, unsupported
from tilewright.serve.web.requests import (
    ChatRequest,
    Common,
    CompletionRequest,
    check_chat,
    check_common,
    decode,
)
from tilewright.serve.web.responses import Job

_SEED_BITS = 63
_NUM_THREADS = 2


class GrammarTrials:
    """Tries grammars before the engine hears of them, in threads whose stacks are deep enough."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads: ThreadPoolExecutor | None = None

    def check(self, spec: GrammarSpec, param: str) -> None:
        """Refuse what cannot be compiled in time; raises ApiError 400."""
        if self._threads is None:
            self._threads = roomy_threads(_NUM_THREADS, "grammars")
            self._threads.submit(self._load).result()  # seconds, once
        try:
            self._threads.submit(self._grammars.check, spec).result(SECONDS)
        except (RequestError, ConfigError) as error:
            raise refuse(error, "invalid_grammar", param) from None
        except TimeoutError:
            said = f"{param}: it takes longer than {SECONDS:g} s to compile; allowed: less"
            raise invalid(said, param, "invalid_grammar") from None

    def _load(self) -> None:
        with suppress(ConfigError):  # it is raised again where a grammar is tried
            self._grammars.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparer:
    """Makes jobs of rows. The same row gives the same job, whenever it is asked.

    Attributes:
        max_tokens: of an answer whose request does not say; None: what there is room for.
        ignore_eos: whether answers go on behind the model's end tokens.
        seed: rows that name none are given one of their own, made of this and of their number.
        created: what answers say of when they were made, in seconds since 1970.
    """

    served: Served
    template: TemplateFacts
    trials: GrammarTrials
    max_tokens: int | None = None
    ignore_eos: bool = False
    seed: int = 0
    created: int = 0

    def job(self, item: Item) -> Job:
        """The job of a row.

        Raises:
            ApiError: 400 for what the server would refuse.
        """
        request: Common
        request, ignored = decode(item.body, ChatRequest if item.is_chat else CompletionRequest)
        asked = self._with_defaults(request, item)
        job = self._chat(asked) if item.is_chat else self._completion(asked)
        job.ignored = (*ignored, *(["stream"] if request.stream else []))
        kind = "chatcmpl" if item.is_chat else "cmpl"
        job.request_id, job.created = f"{kind}-{item.row}", self.created
        return job

    def _with_defaults(self, request: Common, item: Item) -> Common:
        changes: dict[str, object] = {}
        if request.seed is None:
            digest = hashlib.blake2b(f"{self.seed} {item.row}".encode(), digest_size=8).digest()
            changes["seed"] = int.from_bytes(digest) >> (64 - _SEED_BITS)
        if request.max_tokens is None:
            changes["max_tokens"] = self.max_tokens
        if self.ignore_eos:
            changes["ignore_eos"] = True
        return msgspec.structs.replace(request, **changes)

    def _chat(self, request: Common) -> Job:
        assert isinstance(request, ChatRequest)
        check_chat(request)
        coder, ready = self.served.coder, self.served.ready
        tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        text = render_chat(
            coder,
            request.messages,
            facts=self.template,
            tools=tools,
            variables=template_variables(
                {}, request.chat_template_kwargs, request.reasoning_effort
            ),
            continues=bool(request.continue_final_message),
            opens=request.add_generation_prompt is not False,
        )
        prompt = encode(coder, text, ready, add_special=False)
        check_prompt(prompt, ready, "messages")
        grammar = self._grammar(request)
        if tools is not None:
            grammar = self._call_grammar(tools, text, grammar)
        elif grammar is not None:
            grammar = behind_reasoning(grammar, text, coder)
        job = make_job(
            self.served,
            request,
            [prompt],
            limit=request.max_completion_tokens or request.max_tokens,
            num_top=(request.top_logprobs or 0) if request.logprobs else None,
            is_chat=True,
            grammar=grammar,
        )
        if tools is not None:
            read_calls(job, tools, self.template.calls)
        return job

    def _completion(self, request: Common) -> Job:
        assert isinstance(request, CompletionRequest)
        check_common(request)
        coder, ready, prompts = self.served.coder, self.served.ready, []
        if request.suffix:
            raise unsupported("suffix", "text is only continued at its end")
        for given in request.prompts():
            if isinstance(given, str):
                prompt = encode(coder, given, ready, add_special=True)
            else:
                prompt = Prompt("", tuple(given))
            check_prompt(prompt, ready, "prompt")
            if request.echo and not isinstance(given, str):
                prompt = Prompt(coder.decode(given), prompt.tokens)
            prompts.append(prompt)
        return make_job(
            self.served,
            request,
            prompts,
            limit=request.max_tokens,
            num_top=request.logprobs,
            is_chat=False,
            grammar=self._grammar(request),
        )

    def _grammar(self, request: Common) -> GrammarSpec | None:
        asked = read_grammar(request)
        if asked is None:
            return None
        self.trials.check(*asked)
        return asked[0]

    def _call_grammar(
        self, tools: ToolsAsked, prompt: str, otherwise: GrammarSpec | None
    ) -> GrammarSpec | None:
        """What holds an answer to calls of ``tools``; None where nothing can and nothing must."""
        form = self.template.calls
        spec = call_grammar(tools, form, self.served.coder, prompt=prompt, otherwise=otherwise)
        if spec is None:
            return None
        try:
            self.trials.check(spec, "tools")
        except ApiError:
            if tools.must_call or otherwise is not None or any(t.is_strict for t in tools.tools):
                raise
            return None
        return spec
