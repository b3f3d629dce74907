"""Greedy text from the model.onnx in this directory, with onnxruntime, numpy and tokenizers.

    python generate.py "Why is the sky blue?" --tokens 64

If the tokenizer has a chat template, the prompt is a user's message. The template needs jinja2.
With ``--raw``, or without a template, the model continues the text unchanged.

The model's inputs:

- ``tokens [B, S]`` int64: new tokens of B sequences.
- ``last_positions [B]`` int32: position of each sequence's last token.
- ``total_length`` int32: the largest last position plus 1.
- ``logit_rows [R]`` int64: indices of rows with logits, among B * S rows.
- ``*.key`` and ``*.value [B, heads, L, D]`` float32 per layer: the cache with L positions. The
  updated cache is ``*.key.out`` and ``*.value.out``.
- ``*.state [B, ...]`` float32: constant-size state, updated in ``*.state.out``. It starts with
  zeros.

The results are ``logits [R, vocabulary]`` and ``hidden [B * S, width]``, the final hidden states
for all tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime
import tokenizers

FOLDER = Path(__file__).resolve().parent


def generate(session: onnxruntime.InferenceSession, prompt: list[int], count: int) -> Iterator[int]:
    """Return ``count`` greedy tokens after the prompt."""
    length = len(prompt) + count
    caches = {
        each.name: np.zeros((1, *(length if n == "L" else n for n in each.shape[1:])), np.float32)
        for each in session.get_inputs()
        if each.name.endswith((".key", ".value", ".state"))
    }
    outputs = ["logits", *(f"{name}.out" for name in caches)]
    tokens, at = np.array([prompt], dtype=np.int64), len(prompt)
    for _ in range(count):
        inputs = {
            "tokens": tokens,
            "last_positions": np.array([at - 1], dtype=np.int32),
            "total_length": np.array(at, dtype=np.int32),
            "logit_rows": np.array([tokens.shape[1] - 1], dtype=np.int64),
        }
        logits, *updated = session.run(outputs, {**inputs, **caches})
        caches = dict(zip(caches, updated, strict=True))
        token = int(logits[0].argmax())
        yield token
        tokens, at = np.array([[token]], dtype=np.int64), at + 1


def chat(template: str, question: str, special: dict[str, str]) -> str:
    """Return a chat's text with a single message, up to the answer. Templates run in a
    sandbox.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A block that marks answers for training. Only its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: object, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    messages = [{"role": "user", "content": question}]
    return environment.from_string(template).render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **special
    )


def encode(tokenizer: tokenizers.Tokenizer, text: str, *, raw: bool) -> list[int]:
    """Return the prompt's tokens.

    A chat template contains special tokens itself. Otherwise tokenizer_config.json selects them, or
    else tokenizer.json.
    """
    path = FOLDER / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    special = {name: value for name, value in config.items() if name.endswith("_token")}
    if config.get("chat_template") and not raw:
        text = chat(config["chat_template"], text, special)
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found
    found = tokenizer.encode(text, add_special_tokens="add_bos_token" not in config).ids
    first = tokenizer.token_to_id(special.get("bos_token", ""))
    return [first, *found] if config.get("add_bos_token") and first is not None else found


def main() -> None:
    """Print the answer to the prompt, up to an end token."""
    parser = argparse.ArgumentParser(description="Greedy text from model.onnx.")
    parser.add_argument("prompt", help="a question, or the text to go on from")
    parser.add_argument("--raw", action="store_true", help="go on from the text as it stands")
    parser.add_argument("--tokens", type=int, default=64, help="the most to generate")
    arguments = parser.parse_args()
    if not arguments.prompt or arguments.tokens < 1:
        parser.error("a prompt that is not empty and at least one token are needed")
    session = onnxruntime.InferenceSession(
        FOLDER / "model.onnx", providers=["CPUExecutionProvider"]
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json"))
    settings = (FOLDER / "tokenizer" / "generation_config.json").read_text(encoding="utf-8")
    ends = set(json.loads(settings)["eos_token_id"])
    try:
        prompt = encode(tokenizer, arguments.prompt, raw=arguments.raw)
    except ModuleNotFoundError:
        parser.error("the chat template needs jinja2: pip install jinja2, or --raw without it")
    longest = int(session.get_modelmeta().custom_metadata_map["tilewright.max_context"])
    if len(prompt) + arguments.tokens > longest:
        parser.error(f"{len(prompt)} tokens and {arguments.tokens} more; allowed: {longest} in all")
    found: list[int] = []
    for token in generate(session, prompt, arguments.tokens):
        if token in ends:
            break
        found.append(token)
    # The answer continues the prompt: decoded separately, it may lose its first space.
    print(tokenizer.decode([*prompt, *found])[len(tokenizer.decode(prompt)) :])


if __name__ == "__main__":
    main()
