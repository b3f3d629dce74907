"""Tasks from checked requests and tokenized prompts: engine requests with their output state.

Knows no event loop and no HTTP, so that server and offline batches share it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.compiler import __version__
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.runtime.messages import EngineReady
from tilewright.runtime.request import UNNUMBERED, EngineRequest
from tilewright.serve.output.choice import ChoiceStream
from tilewright.serve.output.reasoning import OPEN, ReasoningSplitter, begins_in_reasoning
from tilewright.serve.output.stops import StopMatcher
from tilewright.serve.output.tool_calls import CallReader
from tilewright.serve.prompt.prepare import TokenizedPrompt, sampling_for
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.base import ToolFormat
from tilewright.serve.tools.tool_request import RequestedTools
from tilewright.serve.web.requests import Common
from tilewright.serve.web.responses import CompletionTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model for new requests.

    Attributes:
        ready: the engines' properties.
        coder: the tokenizer.
        name: model name in responses.
        fingerprint: see `fingerprint_of`.
        defaults: sampling parameters for requests without them.
    """

    ready: EngineReady
    coder: TextCoder
    name: str
    fingerprint: str
    defaults: Mapping[str, float]


_TITLES = ("configuration", "precision_rule")
"""Facts for readers. Answers do not depend on them."""


def fingerprint_of(facts: Mapping[str, str]) -> str:
    """Return a hash over all settings with an effect on the output."""
    lines = [f"{key}={facts[key]}" for key in sorted(facts) if key not in _TITLES]
    digest = hashlib.sha256("\n".join([__version__, *lines]).encode())
    return f"fp_{digest.hexdigest()[:16]}"


def template_variables(
    defaults: Mapping[str, Any], requested: Mapping[str, Any] | None, effort: str | None
) -> dict[str, Any]:
    """Return the variables for a chat template.

    Args:
        defaults: the operator's variables.
        requested: the request's variables. They replace equal names.
        effort: the request's reasoning effort. ``none`` disables thinking.
    """
    variables = {**defaults, **(requested or {})}
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables["enable_thinking"] = False
    return variables


def make_task(
    served: Served, request: Common, prompts: Sequence[TokenizedPrompt], grammar: GrammarSpec | None
) -> CompletionTask:
    """Return a request's job: ``n`` choices of each prompt. Their seeds differ.

    Raises:
        ApiError: 400 naming the parameter that is invalid.
    """
    options = request.stream_options
    return CompletionTask(
        request_id=("chatcmpl-" if request.is_chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=served.name,
        fingerprint=served.fingerprint,
        coder=served.coder,
        choices=_choices(served, request, prompts, grammar),
        n=request.n or 1,
        is_chat=request.is_chat,
        num_top=request.num_top,
        streams=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        timings=bool(request.timings),
        return_token_ids=bool(request.return_token_ids),
    )


def read_calls(job: CompletionTask, tools: RequestedTools, form: ToolFormat) -> None:
    """Separate tool calls from every choice's content."""
    for choice in job.choices:
        parser = form.parser(tools.tools)
        choice.reader = CallReader(
            parser, form.new_id, tools.is_parallel, must_call=tools.must_call
        )
        choice.show(form.tokens)


def _choices(
    served: Served, request: Common, prompts: Sequence[TokenizedPrompt], grammar: GrammarSpec | None
) -> list[ChoiceStream]:
    choices, coder = [], served.coder
    keeps = bool(request.include_stop_str_in_output)
    thinks = request.is_chat and OPEN in (coder.chat_template or "")
    for prompt in prompts:
        sampling = sampling_for(
            request,
            prompt,
            served.ready,
            coder,
            defaults=served.defaults,
            has_grammar=grammar is not None,
        )
        is_open = request.is_chat and begins_in_reasoning(prompt.text)
        for at in range(request.n or 1):
            engine_request = EngineRequest(
                UNNUMBERED,
                prompt.tokens,
                _with_seed(sampling, at),
                priority=request.priority or 0,
                grammar=grammar,
                cache_salt=request.cache_salt or "",
                speculative=request.speculative is not False,
                images=prompt.images,
            )
            choice = ChoiceStream(
                coder=coder,
                request=engine_request,
                matcher=StopMatcher(request.stops, includes=keeps),
                splitter=ReasoningSplitter(is_open=is_open, may_open=thinks),
                keeps_end=keeps,
                echo=prompt.text if request.echoes else "",
            )
            choices.append(choice)
    return choices


def _with_seed(sampling: SamplingParams, at: int) -> SamplingParams:
    """Return the sampling of choice ``at``. Its number is added to the seed, in 64 bits."""
    seed = (sampling.seed + at + (1 << 63)) % (1 << 64) - (1 << 63)
    return replace(sampling, seed=seed)
