"""``python -m bench compare-drafts``: decode speed with n-gram drafts and without.

Both engines are in a process and read the same weights. Outputs must be equal. With
``--llama-server``, llama.cpp runs the same prompts without and with its prompt lookup.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Server, keeper, llama_cpp, model_and_copy, running
from tilewright.compiler.devices import describe_cpu
from tilewright.errors import TilewrightError
from tilewright.options.arguments import integer, option, parse

if TYPE_CHECKING:
    from tilewright.llm import LLM

_CODE = Path(__file__).with_name("make_batch.py").read_text("utf-8")[:1800]
_NOTE = (
    "The harbour of Port Ellery was built in 1874 by Samuel Greene, who came from Dundee. The sea "
    "wall is 412 metres long. In the winter of 1921 a storm broke the northern end, and eleven "
    "boats were lost. The town council rebuilt it within two years with granite from Aberdeen. "
    "Today the harbour has 64 berths, a small museum and a lighthouse that was automated in 1987. "
    "Every June the town holds a regatta, and about 3,000 people come to watch it."
)
PROMPTS: Mapping[str, Sequence[str]] = {
    "code edit": (
        f"Rewrite this Python program. Change only the docstring of the module.\n```\n{_CODE}```",
        f"Print this Python program with `sys` imported too.\n```\n{_CODE[:1200]}```",
    ),
    "summary": (
        f"Summarise this text in four sentences. Use its own words.\n\n{_NOTE}",
        f"List every fact and number of this text.\n\n{_NOTE}",
    ),
    "prose": (
        "Write a story about a lighthouse keeper who finds a letter.",
        "Describe a walk through a forest in autumn.",
    ),
}
"""Prompts by type of text."""
_PLAIN, _DRAFTS = "plain", "drafts"
_LOOKUP = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "5")
_CONTEXT = 2048

Decode = Callable[[Sequence[int], int], tuple[tuple[int, ...], float]]
"""Continues a prompt. Returns the tokens and tokens per second after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    model: str | None = option("a GGUF file (default: the default model)", metavar="PATH")
    precision: str | None = option("precision configuration (default: as in run)", metavar="NAME")
    config: str = option("speculative_config", default='{"method": "ngram"}', metavar="JSON")
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("alternating rounds", default=5, type=integer(1, 1000))
    max_tokens: int = option("maximum answer length", default=256, type=integer(2, 1024))
    llama_server: Path | None = option("llama.cpp program (default: none)", type=Path)
    gguf_type: str = option("weights of llama.cpp", default="BF16", metavar="TYPE")
    results: Path | None = option("append rows, as JSON lines", metavar="FILE", type=Path)


def main(argv: list[str]) -> int:
    """Run ``compare-drafts`` and return the exit code."""
    options = parse(_Options, argv, prog="python -m bench compare-drafts", description=__doc__)
    keep, rows = keeper(options.results), list[dict[str, Any]]()
    with ExitStack() as stack:
        tokenizer, engines = _engines(options, stack)
        for title, texts in PROMPTS.items():
            speeds = {name: list[float]() for name in engines}
            for text in texts:
                chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
                _measure(engines, tokenizer.encode(chat), options, speeds)
            rows.append(_summary(title, speeds))
            keep({**rows[-1], "config": options.config, "max_tokens": options.max_tokens})
    for line in rows:
        print(", ".join(f"{name} {_text(value)}" for name, value in line.items()))
    print("Decode, 1 user, tokens/s. Medians over prompts and rounds.")
    return 0


def _engines(options: _Options, stack: ExitStack) -> tuple[Any, dict[str, Decode]]:
    """Return the tokenizer, and the engines by name."""
    from tilewright.llm import LLM

    words: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": _CONTEXT}
    words |= {"precision": options.precision, "num_threads": options.threads}
    plain = LLM(options.model, **words)
    drafts = LLM(options.model, **words, speculative_config=options.config)
    engines = dict[str, Decode]()
    for name, llm in ((_PLAIN, plain), (_DRAFTS, drafts)):
        stack.callback(llm.close)
        engines[name] = _decode_of(llm)
    if options.llama_server is not None:
        _, path = model_and_copy(options.model, options.gguf_type)
        threads = options.threads or describe_cpu().num_cores
        server = llama_cpp(options.llama_server, path, users=1, context=_CONTEXT, threads=threads)
        lookup = replace(server, command=(*server.command, *_LOOKUP))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, entry in (("llama.cpp", server), ("llama.cpp lookup", lookup)):
            engines[name] = _decode_by(entry, stack, folder / f"{name}.log")
    return plain.tokenizer, engines


def _decode_of(llm: LLM) -> Decode:
    def decode(tokens: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
        with llm.stream_tokens(tokens, max_tokens=max_tokens) as stream:
            for _ in stream:
                pass
            answer = stream.answer
        return answer.tokens, answer.tokens_per_second or 0.0

    return decode


def _decode_by(server: Server, stack: ExitStack, log: Path) -> Decode:
    url = stack.enter_context(running(server, log))

    def decode(tokens: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
        body = {"prompt": list(tokens), "n_predict": max_tokens, "temperature": 0}
        data = json.dumps({**body, "cache_prompt": False, "return_tokens": True}).encode()
        head = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/completion", data, head)) as got:
            answer = json.load(got)
        return tuple(answer["tokens"]), answer["timings"]["predicted_per_second"]

    return decode


def _measure(
    engines: Mapping[str, Decode],
    tokens: Sequence[int],
    options: _Options,
    speeds: Mapping[str, list[float]],
) -> None:
    """Run the engines in alternation, after a warm-up.

    Raises:
        TilewrightError: if drafts change the output.
    """
    for turn in range(1 + options.rounds):
        outputs = dict[str, tuple[int, ...]]()
        for name, decode in engines.items():
            outputs[name], speed = decode(tokens, options.max_tokens)
            if turn:
                speeds[name].append(speed)
        if outputs[_PLAIN] != outputs[_DRAFTS]:
            raise TilewrightError("drafts change the output; allowed: equal tokens")


def _summary(name: str, speeds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(speeds[_PLAIN], speeds[_DRAFTS], strict=True)]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return {"text": name, **medians, "ratio": statistics.median(ratios), "ratios": spread}


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
