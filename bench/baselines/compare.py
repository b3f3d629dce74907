"""``python -m bench compare``: the CPU target and baselines with the same weights, in turn.

Every engine is an OpenAI endpoint on this machine and is loaded by the same client. One endpoint
works at a time. A failed endpoint loses its own rows only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.baselines.genai_server import ENGINES
from bench.baselines.gguf_copy import gguf_sizes
from bench.common import (
    CompareOptions,
    Pair,
    Server,
    check_program,
    llama_cpp,
    model_and_copy,
    own_server,
    read_pair,
    running,
)
from tilewright.compiler.devices import CPU_BACKENDS, describe_cpu
from tilewright.errors import ConfigError, TilewrightError, allowed
from tilewright.evaluate.load.client import COMPLETIONS, ResponseTiming, at_most, connected
from tilewright.evaluate.report.comparisons import rates_table, read_parts, source_of, write_part
from tilewright.evaluate.results import stats
from tilewright.models import find_model, load_model
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.child_process import PYTHON, Child
from tilewright.utils.environment import PACKAGES, environment
from tilewright.utils.json_lines import check_writable

BASELINES = ("llama.cpp", *ENGINES)
_OWN_NAMES = {"native": "tilewright native", "onnxruntime": "tilewright"}
_PACKAGES = ("onnxruntime-genai", "openvino-genai")
_OPENVINO_KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16")
_PAIRS = "pure-q40=Q4_0 pure-q80=Q8_0 all-bfp4=Q4_0 all-bfp8=Q8_0 bf16=BF16"
_WARM_UP, _IDLE_SECONDS = 8, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(CompareOptions):
    """The command line of ``python -m bench compare``."""

    rounds: int = option("alternating rounds", default=7, type=integer(1, 1000))
    pairs: tuple[Pair, ...] = option(
        "a configuration and the GGUF type for baselines",
        default=tuple(map(read_pair, _PAIRS.split())),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    baselines: tuple[str, ...] = option(
        f"from {', '.join(BASELINES)}", default=("llama.cpp", "openvino"), nargs="*", metavar="NAME"
    )
    backends: tuple[str, ...] = option(
        "CPU backends", default=("native",), choices=tuple(CPU_BACKENDS)
    )
    prefill: tuple[int, ...] = option("prompt lengths", default=(512,), type=integer(1, 1 << 20))
    context: int = option("prompt length before decode", default=128, type=integer(1, 1 << 20))
    users: tuple[int, ...] = option(
        "users that decode together", default=(8, 32), nargs="*", type=integer(2, 256)
    )
    busy: tuple[int, ...] = option(
        "number of busy processes during decode", default=(), nargs="*", type=integer(1, 1024)
    )
    decode_tokens: int = option("decoded tokens per user", default=128, type=integer(3, 1 << 20))
    part: str = option("part name in the file --json", default="formats")
    onnx_genai_folder: Path | None = option(
        "an int4 folder by onnxruntime_genai.models.builder", metavar="DIR", type=Path
    )
    json: Path | None = option("keep every repeat, versions and host", metavar="FILE", type=Path)


@dataclass(frozen=True, slots=True)
class Measure:
    """A speed: prefill, or decode with several users and busy processes."""

    name: str
    prompt_length: int
    num_tokens: int
    num_users: int = 1
    num_busy: int = 0

    def rate(self, heard: Sequence[ResponseTiming]) -> float:
        """Return tokens per second.

        Prefill ends with the answer: a single token may have no text. Decode counts tokens between
        the last first token and the first end, without the first.
        """
        if self.num_tokens == 1:
            return self.prompt_length / heard[0].ended
        times = [[each.began + at for at in each.times] for each in heard]
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        if end <= begin:
            raise TilewrightError("users did not decode together; allowed: more --decode-tokens")
        count = sum(
            sum(begin < at <= end for at in each) * one.count / len(each)
            for each, one in zip(times, heard, strict=True)
        )
        return count / (end - begin)


def measures_of(options: Options) -> list[Measure]:
    """Return the measures for a round in their order."""
    decode, count = f"decode-{options.context}", options.decode_tokens
    found = [Measure(f"prefill-{length}", length, 1) for length in options.prefill]
    found += [Measure(f"{decode}-x{n}", options.context, count, n) for n in options.users]
    found += [Measure(decode, options.context, count)]
    busy = [Measure(f"{decode}-busy{n}", options.context, count, 1, n) for n in options.busy]
    return [*found, *busy]


Sizes = tuple[int | None, int | None]
"""Bytes in all weights, and bytes read by a decode step."""


@dataclass(slots=True)
class ComparedEngine:
    """An engine with its weights, its endpoint and its rates by measure."""

    engine: str
    weights: str
    server: Server
    sizes: Sizes = (None, None)
    has_batching: bool = True
    rates: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    url: str = ""

    @property
    def name(self) -> str:
        """Engine and weights, as in tables."""
        return f"{self.engine} {self.weights}"

    def measure(self, measure: Measure, prompts: list[list[int]], *, counts: bool = True) -> None:
        """Measure a rate, unless the engine failed before."""
        if self.failure or (measure.num_users > 1 and not self.has_batching):
            return
        try:
            heard = asyncio.run(_ask(self.url, measure, prompts))
            if errors := [each.error for each in heard if each.error]:
                raise TilewrightError(errors[0])
            if counts:
                rate = measure.rate(heard)
                self.rates.setdefault(measure.name, []).append(rate)
        except (OSError, TilewrightError) as error:
            self.failure = str(error)

    def record(self, decode: str, bandwidth: float) -> dict[str, Any]:
        """Return the figures as JSON values: bytes, and tokens per second for every repeat."""
        rates: dict[str, dict[str, Any]] = {
            name: {
                "median": statistics.median(repeats),
                "spread": stats.spread(repeats) if len(repeats) > 1 else None,
                "repeats": repeats,
            }
            for name, repeats in self.rates.items()
        }
        weights, step = self.sizes
        share = step * rates[decode]["median"] / bandwidth if step and decode in rates else None
        names = {"engine": self.engine, "weights": self.weights, "failure": self.failure}
        sizes = {"weight_bytes": weights, "step_bytes": step, "bandwidth_share": share}
        return {**names, **sizes, "rates": rates}


async def _ask(url: str, measure: Measure, prompts: list[list[int]]) -> list[ResponseTiming]:
    async with connected(url, "any") as client:
        jobs = [
            partial(
                client.stream,
                COMPLETIONS,
                {
                    **{"prompt": prompt, "max_tokens": measure.num_tokens, "temperature": 0},
                    **{"ignore_eos": True, "cache_prompt": False},
                },
            )
            for prompt in prompts[: measure.num_users]
        ]
        heard, _ = await at_most(measure.num_users, jobs)
        return heard


def engines_of(
    options: Options,
) -> tuple[list[ComparedEngine], list[tuple[ComparedEngine, ComparedEngine]]]:
    """Return all engines, and the pairs with a baseline."""
    measures, threads = measures_of(options), options.num_threads
    users = max(each.num_users for each in measures)
    context = max(each.prompt_length + each.num_tokens for each in measures) + 8
    sizes: dict[str, Any] = {"users": users, "context": context, "threads": threads}
    found: dict[str, ComparedEngine] = {}
    versus = []
    find_model(options.model)
    if "llama.cpp" in options.baselines:
        check_program(options.llama_server)  # before our weights are compiled
    for pair in options.pairs:
        path, copy = model_and_copy(options.model, pair.gguf_type)
        ours, others = [], []
        for backend in options.backends:
            server = own_server(str(path), pair.precision, **sizes)
            more = ("--backend", backend, "--no-prefix-cache")
            server = Server(_OWN_NAMES[backend], (*server.command, *more))
            own = step_bytes(path, pair.precision, CPU_BACKENDS[backend], context)
            ours.append(ComparedEngine(server.name, pair.precision, server, own))
        for name in options.baselines:
            if name == "llama.cpp":
                server = llama_cpp(options.llama_server, copy, **sizes)
                others.append(ComparedEngine(name, pair.gguf_type, server, gguf_sizes(copy)))
                continue
            folder = options.onnx_genai_folder
            if name == "openvino" and pair.gguf_type not in _OPENVINO_KINDS:
                continue
            if name == "onnx-genai" and (folder is None or not pair.gguf_type.startswith("Q4")):
                continue
            weights = pair.gguf_type if name == "openvino" else "int4"
            source = copy if name == "openvino" else folder
            words = (*PYTHON, "-m", "bench.baselines.genai_server", name, str(source))
            server = Server(name, (*words, "--threads", str(threads)))
            file_sizes: Sizes = gguf_sizes(copy) if name == "openvino" else (None, None)
            others.append(ComparedEngine(name, weights, server, file_sizes, has_batching=False))
        ours, others = (
            [found.setdefault(e.name, e) for e in engines] for engines in (ours, others)
        )
        versus += [(own, other) for own in ours for other in others]
    return list(found.values()), versus


def step_bytes(path: Path, precision: str, target: str, context: int) -> tuple[int, int]:
    """Return the bytes in the compiled weights, and the bytes read by a decode step."""
    from tilewright.compiler.artifacts.cache import ProgramCache
    from tilewright.compiler.artifacts.program import compile_cached
    from tilewright.compiler.precision import load_precision
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.evaluate.measure.roofline import compiled_weight_bytes

    named: dict[str, Any] = {"target": target, "options": CompileOptions(max_context=context)}
    cache, config = ProgramCache.default(), load_precision(precision)
    compiled = compile_cached(load_model(path), config, cache, **named)
    file_sizes = compiled.executable.memory().weights
    read = int(sum(compiled_weight_bytes(compiled).values()))
    compiled.executable.close()
    return file_sizes, read


def measure_all(engines: Sequence[ComparedEngine], options: Options) -> list[float]:
    """Fill in all rates. Return the memory read rate before and after every round."""
    from tilewright.evaluate.measure.ceilings import read_bandwidth

    measures, chooser = measures_of(options), random.Random(7)
    bandwidths = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for number, engine in enumerate(engines):
            try:
                log = Path(folder) / f"{number}.log"
                engine.url = stack.enter_context(running(engine.server, log))
            except TilewrightError as error:
                engine.failure = str(error)
        for number in range(-1, options.rounds):
            for measure in measures:
                tokens = min(_WARM_UP, measure.num_tokens) if number < 0 else measure.num_tokens
                settings = dataclasses.replace(measure, num_tokens=tokens)
                with spinning(measure.num_busy):
                    for engine in engines:
                        prompts = [
                            [chooser.randrange(256) for _ in range(measure.prompt_length)]
                            for _ in range(measure.num_users)
                        ]
                        engine.measure(settings, prompts, counts=number >= 0)
                        time.sleep(_IDLE_SECONDS)  # thread pools spin after their work
            bandwidths.append(read_bandwidth(options.num_threads))
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    return bandwidths


@contextmanager
def spinning(num_processes: int) -> Iterator[None]:
    """Run busy processes during the block."""
    with ExitStack() as stack:
        for _ in range(num_processes):
            command = (*PYTHON, "-S", "-c", "while True: pass")
            stack.enter_context(Child(command, what="a busy process"))
        if num_processes:
            time.sleep(_IDLE_SECONDS)
        yield


def record_of(
    options: Options,
    engines: Sequence[ComparedEngine],
    versus: Sequence[tuple[ComparedEngine, ComparedEngine]],
    bandwidths: Sequence[float],
) -> dict[str, Any]:
    """Return the record for `rates_table`."""
    model, bandwidth = load_model(find_model(options.model)), statistics.median(bandwidths)
    ratios = []
    for own, other in versus:
        for name in own.rates.keys() & other.rates.keys():
            pairs = zip(own.rates[name], other.rates[name], strict=False)
            repeats = [mine / theirs for mine, theirs in pairs]
            names = {"ours": own.name, "peer": other.name, "measure": name}
            ratios.append({**names, "median": statistics.median(repeats), "repeats": repeats})
    decode = f"decode-{options.context}"
    return {
        "model": model.name,
        "model_hash": model.checkpoint.content_hash(),
        "device": describe_cpu().model_name,
        "instruction_set": _instruction_set() if "native" in options.backends else "",
        "num_threads": options.num_threads,
        "num_rounds": options.rounds,
        "measures": [dataclasses.asdict(measure) for measure in measures_of(options)],
        "bandwidth": {"median": bandwidth, "readings": list(bandwidths)},
        "contestants": [each.record(decode, bandwidth) for each in engines],
        "ratios": ratios,
        **dataclasses.asdict(environment((*PACKAGES, *_PACKAGES), hash_host=True)),
    }


def _instruction_set() -> str:
    from tilewright.compiler.targets.cpu.native.library import binding

    return binding.ISA_NAMES[binding.library().tw_best_isa()]


def main(argv: list[str]) -> int:
    """Run ``python -m bench compare``. Return 1 if an engine of ours failed."""
    words = "Measure the CPU target and baselines with the same weights, in turn."
    options = parse(Options, argv, prog="python -m bench compare", description=words)
    if unknown := set(options.baselines) - set(BASELINES):
        raise ConfigError(f"--baselines {unknown.pop()!r}; {allowed(BASELINES)}")
    if options.json is not None:
        check_writable(options.json)
        read_parts(options.json)
    engines, versus = engines_of(options)
    record = record_of(options, engines, versus, measure_all(engines, options))
    print(rates_table(record, is_full=True).markdown())
    print(source_of(record))
    failed = [each for each in engines if each.failure]
    for each in failed:
        print(f"{each.name}: {each.failure}")
    if options.json is not None:
        write_part(options.json, options.part, record)
    return int(any(each.engine in _OWN_NAMES.values() for each in failed))
