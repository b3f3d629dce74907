"""``tilewright run``: answer a single prompt. Standard output has the answer only."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.ask import (
    AskArguments,
    ModelStatusLine,
    PromptArgs,
    compile_model,
    cost_line,
    messages_of,
    open_model,
    read_args,
)
from tilewright.cli.commands import nodes
from tilewright.errors import ConfigError, RequestError
from tilewright.options.arguments import option, read_prompt

if TYPE_CHECKING:
    from tilewright.llm import LLM, Answer
    from tilewright.loading.source import ModelHandle

_LEAST_CONTEXT = 2048
"""Minimum context, up to the limit of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunArgs(AskArguments):
    prompt: str | None = option("text of the prompt, or - for standard input (default: -)")
    image: tuple[str, ...] = option(
        "image file for the model (repeatable)", default=(), metavar="FILE"
    )
    as_json: bool = option(
        "print a JSON object with text, tokens, finish reason and timings", "--json", default=False
    )
    figures: bool = option("print a table of timings on standard error", default=False)


def main(argv: list[str]) -> int:
    """Run ``tilewright run``. Return the exit code."""
    if nodes.has_options(argv):
        return nodes.main(argv)
    sign, started = ModelStatusLine(), time.perf_counter()
    words = (
        "Answer a prompt with a model. Other options: tilewright run --nodes --help "
        "(distributed-llama)."
    )
    try:
        args = read_args(argv, _RunArgs, sign, prog="tilewright run", description=words)
        prompt = _prompt(args.arguments.prompt)
        source = open_model(args, sign)
        tokens, images = _prompt_of(source, prompt, args.arguments)
        llm = compile_model(args, source, sign, context=_context(source, args, len(tokens)))
        ready_s = time.perf_counter() - started
        sign.show("reading the prompt")
        answer = _answer(llm, tokens, images, args, sign)
    finally:
        sign.clear()
    if args.arguments.as_json:
        print(json.dumps(_facts(llm, answer, ready_s), ensure_ascii=False))
    elif args.arguments.figures:
        _print_figures(llm, answer, ready_s)
    else:
        sign.note(f"{cost_line(llm, answer)}; ready after {ready_s:.1f} s")
    llm.close()
    return 0


def _prompt(given: str | None) -> str:
    """Return the prompt from the command line or standard input.

    Raises:
        ConfigError: if the prompt is missing, empty or not text.
    """
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(
            "no prompt; allowed: --prompt TEXT, a text on standard input, or tilewright chat"
        )
    return read_prompt("-" if given is None else given)


def _tokens(source: ModelHandle, prompt: str, system: str | None) -> tuple[int, ...]:
    """Return the prompt's tokens as a chat, or as text without a chat template."""
    tokenizer = source.tokenizer
    if tokenizer.has_chat_template:
        chat: list[dict[str, Any]] = [*messages_of(system), {"role": "user", "content": prompt}]
        return tuple(tokenizer.encode(tokenizer.apply_chat_template(chat)))
    if system is not None:
        raise RequestError(
            f"{source.name} has no chat template, and so no system message; allowed: without "
            "--system"
        )
    return tuple(tokenizer.encode(prompt, add_special=True))


def _prompt_of(source: ModelHandle, prompt: str, arguments: Any) -> tuple[tuple[int, ...], Any]:
    """Return token ids and the images in them.

    Raises:
        RequestError: The model takes no images, or an image is invalid.
    """
    if not arguments.image:
        return _tokens(source, prompt, arguments.system), ()
    from tilewright.images.decode import ImageLimits
    from tilewright.images.parts import take_images
    from tilewright.images.prompt import insert_images
    from tilewright.images.squares import expand_markers
    from tilewright.loading.source import image_processor

    processor = image_processor(source)
    parts = [{"type": "image", "image": path} for path in arguments.image]
    content: list[Any] = [*parts, {"type": "text", "text": prompt}]
    asking: list[dict[str, Any]] = [*messages_of(arguments.system)]
    asking.append({"role": "user", "content": content})
    chat, images = take_images(asking, ImageLimits(), processor.prepare, is_local=True)
    tokenizer = source.tokenizer
    text = tokenizer.apply_chat_template(chat)
    text = expand_markers(text, processor)
    return insert_images(tokenizer.encode(text), images, processor.image_token)


def _context(source: ModelHandle, args: PromptArgs, num_prompt: int) -> int:
    """Return the context for the prompt and its answer.

    Raises:
        RequestError: if the model has fewer positions.
    """
    from tilewright.llm import MAX_TOKENS

    least, most = args.sampling.get("max_tokens", 1), source.max_positions
    named = args.model.config.max_model_len
    if named is not None:
        most = min(most, named)
    if num_prompt + least > most:
        raise RequestError(
            f"a prompt of {num_prompt} tokens and {least} to generate do not fit the context; "
            f"allowed: {most} together"
        )
    if named is not None:
        return named
    wanted = num_prompt + args.sampling.get("max_tokens", MAX_TOKENS)
    return min(most, max(wanted, _LEAST_CONTEXT))


def _answer(
    llm: LLM, tokens: tuple[int, ...], images: Any, args: PromptArgs, sign: ModelStatusLine
) -> Answer:
    with llm.stream_tokens(tokens, images, **args.sampling) as stream:
        for number, piece in enumerate(stream):
            if not args.arguments.as_json:
                if not number:
                    sign.clear()
                print(piece, end="", flush=True)
        if not args.arguments.as_json:
            print(flush=True)
        return stream.answer


def _facts(llm: LLM, answer: Answer, ready_s: float) -> dict[str, object]:
    rate = answer.tokens_per_second
    drafts: dict[str, int] = {}
    if answer.num_draft_tokens:
        drafts["draft_n"] = answer.num_draft_tokens
        drafts["draft_n_accepted"] = answer.num_accepted_tokens
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.num_prompt_tokens,
        "timings": {
            "ready_s": round(ready_s, 4),
            "first_token_s": round(answer.first_s, 4),
            "total_s": round(answer.total_s, 4),
            "tokens_per_second": None if rate is None else round(rate, 2),
            **drafts,
        },
        "model": llm.source.name,
        "weights": llm.source.weights,
        "target": llm.compiled.target,
        "precision": llm.compiled.precision.name,
    }


def _print_figures(llm: LLM, answer: Answer, ready_s: float) -> None:
    from tilewright.cli.terminal.console import err, print_table
    from tilewright.evaluate.report.table import Table

    rate = answer.tokens_per_second
    rows = [
        ("ready after (s)", f"{ready_s:.2f}"),
        ("tokens of the prompt", str(answer.num_prompt_tokens)),
        ("first token after (s)", f"{answer.first_s:.3f}"),
        ("tokens of the answer", str(len(answer.tokens))),
        ("then (t/s)", "-" if rate is None else f"{rate:.1f}"),
        ("weights (MB)", f"{llm.compiled.executable.memory().weights / 1e6:,.0f}"),
        ("ended by", answer.finish_reason),
    ]
    table = Table.of(("", "figure"), rows, "one answer, once: tilewright bench measures")
    print_table(err(), cost_line(llm, answer), table, numbers=True)
