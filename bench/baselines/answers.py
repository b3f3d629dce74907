"""``python -m bench compare-answers``: ten greedy answers, compared with llama.cpp's server.

All engines read the same file. llama.cpp runs twice: with its defaults, and in float32 throughout.
At the first different token, both engines give the margin from their log probabilities.
"""

from __future__ import annotations

import http.client
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from bench.common import Server, check_program, llama_cpp, model_and_copy, running
from tilewright.compiler.devices import describe_cpu
from tilewright.errors import TilewrightError
from tilewright.evaluate.report.display import short_commit
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.environment import environment

if TYPE_CHECKING:
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
_FLOAT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
_CONTEXT, _MAX_TEXT, _NUM_PROBS = 1024, 90, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    model: str | None = option("a GGUF file (default: the default model)", metavar="PATH")
    llama_server: Path = option("llama.cpp program", default=Path("llama-server"), type=Path)
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    max_tokens: int = option("maximum answer length", default=48, type=integer(1, 512), metavar="N")


@dataclass(frozen=True, slots=True)
class Side:
    """An engine.

    Attributes:
        answer: Continues a prompt greedily, to an end token or the maximum length.
        logits: Logits ``[vocab]`` after a text, up to a constant.
    """

    answer: Callable[[Sequence[int]], tuple[int, ...]]
    logits: Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The first different token after ``at`` equal tokens, and the margin of each engine."""

    at: int
    gaps: tuple[float, float]


def main(argv: list[str]) -> int:
    """Run ``python -m bench compare-answers``. Return 1 if the exact engines differ."""
    words = "Answer ten questions with Tilewright and llama.cpp, from the same file."
    options = parse(_Options, argv, prog="python -m bench compare-answers", description=words)
    check_program(options.llama_server)
    source, copy = model_and_copy(options.model, "F32")
    with ExitStack() as stack:
        tokenizer, prompts, sides = _open(source, copy, options, stack)
        answers = {
            name: [side.answer(prompt) for prompt in prompts] for name, side in sides.items()
        }
        differences = {pair: part_all(prompts, answers, sides, pair) for pair in PAIRS}
    chats = zip(prompts, answers[DEFAULT], strict=True)
    texts = [tokenizer.decode(answer, after=prompt) for prompt, answer in chats]
    print(table(texts, answers, differences).markdown())
    print("\n".join(f"- {line}" for line in summary(differences)))
    found = environment()
    where = f"{source.name}, {found.timestamp[:10]}, commit {short_commit(found.commit)}"
    print(f"\n`python -m bench compare-answers --max-tokens {options.max_tokens}`, {where}")
    return int(any(differences[EXACT, FLOAT_PEER]))


def _open(
    source: Path, copy: Path, options: _Options, stack: ExitStack
) -> tuple[Any, list[tuple[int, ...]], dict[str, Side]]:
    """Return the tokenizer, the prompts and the four engines."""
    from tilewright.llm import LLM

    threads = options.threads or describe_cpu().num_cores
    ours: dict[str, Any] = {"num_threads": threads, "max_num_seqs": 1, "max_context": _CONTEXT}
    default = stack.enter_context(LLM(source, **ours))
    exact = stack.enter_context(LLM(source, precision="stored", compute="exact", **ours))
    tokenizer = default.tokenizer
    chats = ([{"role": "user", "content": each}] for each in QUESTIONS)
    prompts = [tuple(tokenizer.encode(tokenizer.apply_chat_template(each))) for each in chats]
    sides = {DEFAULT: _of_own(default, options), EXACT: _of_own(exact, options)}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name, path, more in ((PEER, source, ()), (FLOAT_PEER, copy, _FLOAT)):
        sizes = {"users": 1, "context": _CONTEXT, "threads": threads}
        server = llama_cpp(options.llama_server, path, **sizes)
        server = Server(name, (*server.command, *more))
        url = stack.enter_context(running(server, folder / f"{name}.log"))
        size = default.source.checkpoint_model().config.vocab_size
        sides[name] = llama_side(url, options.max_tokens, size, tokenizer.eos_ids)
    return tokenizer, prompts, sides


def _of_own(llm: LLM, options: _Options) -> Side:
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


def llama_side(url: str, max_tokens: int, vocab_size: int, ends: Sequence[int]) -> Side:
    """Return a ``llama-server`` as an engine."""

    def complete(prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
        body = {"prompt": list(prompt), "n_predict": count, "temperature": 0, **more}
        connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=600)
        try:
            data = json.dumps({**body, "cache_prompt": False})
            connection.request("POST", "/completion", data, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise TilewrightError(f"llama.cpp: {said[:300].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(said)
        return found

    def answer(prompt: Sequence[int]) -> tuple[int, ...]:
        found = complete(prompt, max_tokens, return_tokens=True)
        tokens = tuple(found["tokens"])
        is_ended = found.get("stop_type") == "eos" and tokens[-1:] not in [(end,) for end in ends]
        return (*tokens, *ends[:1]) if is_ended else tokens

    def logits(text: Sequence[int]) -> np.ndarray:
        found = complete(text, 1, n_probs=_NUM_PROBS)["completion_probabilities"][0]
        known = {each["id"]: each["logprob"] for each in found["top_logprobs"]}
        values = np.full(vocab_size, min(known.values()))
        values[list(known)] = list(known.values())
        return values

    return Side(answer, logits)


def part_all(
    prompts: Sequence[tuple[int, ...]],
    answers: Mapping[str, Sequence[tuple[int, ...]]],
    sides: Mapping[str, Side],
    pair: tuple[str, str],
) -> list[BranchPoint | None]:
    """Return the first difference of a pair for each prompt, None for equal answers."""
    found: list[BranchPoint | None] = []
    one, other = pair
    for prompt, mine, theirs in zip(prompts, answers[one], answers[other], strict=True):
        if mine == theirs:
            found.append(None)
            continue
        # An answer ends at an end token, so no answer begins with another answer.
        at = next(n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        text = (*prompt, *mine[:at])
        first, second = sides[one].logits(text), sides[other].logits(text)
        gaps = first[mine[at]] - first[theirs[at]], second[theirs[at]] - second[mine[at]]
        found.append(BranchPoint(at, (float(gaps[0]), float(gaps[1]))))
    return found


def table(
    texts: Sequence[str],
    answers: Mapping[str, Sequence[tuple[int, ...]]],
    differences: Mapping[tuple[str, str], Sequence[BranchPoint | None]],
) -> Table:
    """Return a row for each question: the default answer, and the differences of all pairs."""
    rows = []
    for at, question in enumerate(QUESTIONS):
        text = " ".join(texts[at].split()).replace("|", "/")
        text = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."
        cells = (cell(differences[pair][at]) for pair in PAIRS)
        rows.append((question, text, str(len(answers[DEFAULT][at])), *cells))
    pairs = (f"{one} and {other}" for one, other in PAIRS)
    return Table.of(("question", "answer by default", "tokens", *pairs), rows)


def cell(difference: BranchPoint | None) -> str:
    """Return ``=``, or the number of equal tokens and both margins."""
    if difference is None:
        return "="
    return f"{difference.at} (by {difference.gaps[0]:.2g} and {difference.gaps[1]:.2g})"


def summary(differences: Mapping[tuple[str, str], Sequence[BranchPoint | None]]) -> list[str]:
    """Return a line for each pair: the number of equal answers and the largest margin."""
    lines = []
    for (one, other), found in differences.items():
        gaps = [max(each.gaps) for each in found if each is not None]
        line = f"{one} and {other}: {found.count(None)} of {len(found)} answers token for token"
        lines.append(f"{line}; the others part by {max(gaps):.2g} at the most" if gaps else line)
    return lines
