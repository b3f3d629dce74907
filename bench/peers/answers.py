"""``bench compare-answers``: ten greetings and questions, answered greedily beside llama.cpp.

Both read the same file. llama.cpp rounds activations to 8 bits where weights are in blocks, and
its cache to half precision, so it is asked twice: as it is, and in float32 throughout. Where two
answers part, the logits of both sides tell how close the choice was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.peers import PEERS
from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.compiler.devices import describe_cpu
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import short_commit
from tilewright.evaluate.report.table import Table
from tilewright.models import find_model
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.environment import PACKAGES, environment

if TYPE_CHECKING:
    from bench.peers.llama_cpp import LlamaCpp
    from tilewright.llm import LLM

QUESTIONS = (
    "hi",
    "Hello!",
    "Good morning, how are you?",
    "Thank you, bye.",
    "Who are you?",
    "What is the capital of France?",
    "Why is the sky blue?",
    "What is 12 times 12?",
    "Name the three primary colours.",
    "Write one sentence about rain.",
)
DEFAULT, EXACT = "default", "exact"
PEER, FLOAT_PEER = "llama.cpp", "float32"
PAIRS = ((EXACT, FLOAT_PEER), (DEFAULT, EXACT), (DEFAULT, PEER), (PEER, FLOAT_PEER))
_CONTEXT = 1024
_SHOWN = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The command line of ``python -m bench compare-answers``."""

    model: str | None = option("a GGUF file (default: the default model)", metavar="PATH")
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    max_tokens: int = option("of an answer (48)", default=48, type=integer(1, 512), metavar="N")


@dataclass(frozen=True, slots=True)
class Side:
    """One engine, which prefers the same token of equal ``[vocab]`` logits, the first.

    Attributes:
        answer: continues a prompt greedily, up to an end token or as far as is asked.
        logits: those behind a text.
    """

    answer: Callable[[Sequence[int]], tuple[int, ...]]
    logits: Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True, slots=True)
class Parting:
    """Two answers part behind ``at`` equal tokens: by so much each side's logit of its own token is
    above that of the other's.
    """

    at: int
    gaps: tuple[float, float]


def main(argv: list[str]) -> int:
    """Run ``bench compare-answers``; returns 1 where the two exact sides differ in tokens."""
    options = parse(
        AnswerOptions,
        argv,
        prog="python -m bench compare-answers",
        description="Answer ten greetings and questions beside llama.cpp, from the same file.",
    )
    source = find_model(options.model).resolve()
    if source.suffix.lower() != ".gguf":
        raise ConfigError(f"{source}: no GGUF file; allowed: a file that llama.cpp reads too")
    if (missing := PEERS[PEER].missing()) is not None:
        raise ConfigError(f"{PEER}: {missing}; allowed: make peers")
    with ExitStack() as stack:
        tokenizer, prompts, sides = open_sides(source, options, stack)
        answers = {
            name: [side.answer(prompt) for prompt in prompts] for name, side in sides.items()
        }
        partings = {pair: part_all(prompts, answers, sides, pair) for pair in PAIRS}
    asked = zip(prompts, answers[DEFAULT], strict=True)
    texts = [tokenizer.decode(answer, after=prompt) for prompt, answer in asked]
    print(table(texts, answers, partings).markdown())
    print("\n".join(f"- {line}" for line in summary(partings)))
    print(f"\n{origin(source, options)}")
    return int(any(partings[EXACT, FLOAT_PEER]))


def open_sides(
    source: Path, options: AnswerOptions, stack: ExitStack
) -> tuple[Any, list[tuple[int, ...]], dict[str, Side]]:
    """The tokenizer, the questions as prompts, and the four engines, which ``stack`` closes."""
    # before OpenMP is loaded: two engines' threads share the cores, so none waits awake
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from bench.peers.gguf_copy import cached_gguf
    from bench.peers.llama_cpp import LlamaCpp
    from tilewright.llm import LLM

    threads = options.threads or describe_cpu().num_cores
    ours: dict[str, Any] = {"num_threads": threads, "max_seats": 1, "max_context": _CONTEXT}
    default = stack.enter_context(LLM(source, **ours))
    exact = stack.enter_context(LLM(source, precision="stored", compute="exact", **ours))
    tokenizer = default.tokenizer
    asked = ([{"role": "user", "content": each}] for each in QUESTIONS)
    prompts = [tuple(tokenizer.encode(tokenizer.apply_chat_template(each))) for each in asked]
    content = default.source.content_hash
    copy = cached_gguf(source, "F32", content_hash=content, folder=cache_dir() / "peers")
    theirs: dict[str, Any] = {"num_threads": threads, "max_context": _CONTEXT}
    peers = {PEER: LlamaCpp(source, **theirs), FLOAT_PEER: LlamaCpp(copy, is_float=True, **theirs)}
    sides = {DEFAULT: _of_ours(default, options), EXACT: _of_ours(exact, options)}
    for name, peer in peers.items():
        sides[name] = _of_peer(peer, options, tokenizer.eos_ids)
    return tokenizer, prompts, sides


def _of_ours(llm: LLM, options: AnswerOptions) -> Side:
    import torch

    from tilewright.runtime.engine import Engine

    def answer(prompt: Sequence[int]) -> tuple[int, ...]:
        with llm.stream_tokens(prompt, max_tokens=options.max_tokens) as stream:
            for _ in stream:
                pass
            return stream.answer.tokens

    def logits(text: Sequence[int]) -> np.ndarray:
        engine = Engine(llm.compiled.executable)
        return engine.prefill([0], [torch.tensor(text)])[0].numpy()

    return Side(answer, logits)


def _of_peer(peer: LlamaCpp, options: AnswerOptions, ends: Sequence[int]) -> Side:
    def answer(prompt: Sequence[int]) -> tuple[int, ...]:
        return peer.generate(prompt, options.max_tokens, ends=ends).tokens

    return Side(answer, peer.logits)


def part_all(
    prompts: Sequence[tuple[int, ...]],
    answers: Mapping[str, Sequence[tuple[int, ...]]],
    sides: Mapping[str, Side],
    pair: tuple[str, str],
) -> list[Parting | None]:
    """For each prompt, where the answers of a pair part; None where they are equal."""
    found: list[Parting | None] = []
    one, other = pair
    for prompt, mine, theirs in zip(prompts, answers[one], answers[other], strict=True):
        if mine == theirs:
            found.append(None)
            continue
        # neither goes on behind an end token, so there is a first place where they differ
        at = next(n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        text = (*prompt, *mine[:at])
        first, second = sides[one].logits(text), sides[other].logits(text)
        gaps = first[mine[at]] - first[theirs[at]], second[theirs[at]] - second[mine[at]]
        found.append(Parting(at, (float(gaps[0]), float(gaps[1]))))
    return found


def table(
    texts: Sequence[str],
    answers: Mapping[str, Sequence[tuple[int, ...]]],
    partings: Mapping[tuple[str, str], Sequence[Parting | None]],
) -> Table:
    """A row a question: the default's answer, its tokens, and where the answers of pairs part."""
    rows = []
    for at, question in enumerate(QUESTIONS):
        text = " ".join(texts[at].split()).replace("|", "/")
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
        cells = (cell(partings[pair][at]) for pair in PAIRS)
        rows.append((question, text, str(len(answers[DEFAULT][at])), *cells))
    pairs = (f"{one} and {other}" for one, other in PAIRS)
    return Table.of(("question", "answer by default", "tokens", *pairs), rows)


def cell(parting: Parting | None) -> str:
    """``=`` for equal answers; else behind how many tokens they part, and by which gaps."""
    if parting is None:
        return "="
    return f"{parting.at} (by {parting.gaps[0]:.2g} and {parting.gaps[1]:.2g})"


def summary(partings: Mapping[tuple[str, str], Sequence[Parting | None]]) -> list[str]:
    """A line a pair: how many answers are equal, and the widest gap where others part."""
    lines = []
    for (one, other), found in partings.items():
        gaps = [max(each.gaps) for each in found if each is not None]
        line = f"{one} and {other}: {found.count(None)} of {len(found)} answers token for token"
        lines.append(f"{line}; the others part by {max(gaps):.2g} at the most" if gaps else line)
    return lines


def origin(source: Path, options: AnswerOptions) -> str:
    """What gave these answers, in one line."""
    found = environment((*PACKAGES, PEERS[PEER].package))
    names = ("onnxruntime", PEERS[PEER].package)
    with_what = ", ".join(f"{name} {found.versions[name]}" for name in names)
    command = f"python -m bench compare-answers --max-tokens {options.max_tokens}"
    commit = short_commit(found.commit)
    return f"`{command}`, {source.name}, {found.timestamp[:10]}, commit {commit}; {with_what}"
