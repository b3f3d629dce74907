"""Greedy text from the model.onnx beside this file, with onnxruntime, numpy and tokenizers alone.

    python generate.py "Why is the sky blue?" --tokens 64

Inputs of the model: ``tokens [B, S]`` int64, the new tokens of B sequences; ``last_positions [B]``
int32, the position of each one's last token; ``total_length`` int32, the largest of them plus one;
``logit_rows [R]`` int64, which of the B * S rows want logits; per layer ``*.key`` and ``*.value
[B, heads, L, D]`` float32, the cache of L positions, which comes back as ``*.key.out`` and
``*.value.out``, and ``*.state [B, ...]`` float32, state that does not grow, which comes back as
``*.state.out``; zeros before the first token. The result is ``logits [R, vocabulary]``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

FOLDER = Path(__file__).resolve().parent


def generate(session: onnxruntime.InferenceSession, prompt: list[int], count: int) -> Iterator[int]:
    """The likeliest token after everything before it, ``count`` times."""
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


def main() -> None:
    """Print the prompt's continuation, up to an end token."""
    parser = argparse.ArgumentParser(description="Greedy text from model.onnx.")
    parser.add_argument("prompt", help="the text to go on from, as it stands")
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
    prompt = tokenizer.encode(arguments.prompt).ids
    longest = int(session.get_modelmeta().custom_metadata_map["tilewright.max_context"])
    if len(prompt) + arguments.tokens > longest:
        parser.error(f"{len(prompt)} tokens and {arguments.tokens} more; allowed: {longest} in all")
    found: list[int] = []
    for token in generate(session, prompt, arguments.tokens):
        if token in ends:
            break
        found.append(token)
    print(tokenizer.decode(found))


if __name__ == "__main__":
    main()
