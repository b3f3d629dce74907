"""``tilewright compare``: the CPU target beside llama.cpp and the GenAI engines, in turn."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers import PEERS
from bench.peers.rounds import Contestant, Plan, measure_all
from bench.peers.tilewright_worker import OURS
from bench.peers.worker import Worker, WorkerError
from tilewright.compiler.artifacts.places import cache_dir, is_compiled
from tilewright.compiler.bench.prompts import bench_text
from tilewright.compiler.child import PYTHON
from tilewright.compiler.commands.arguments import integer, option, parse, real
from tilewright.compiler.devices import CPU_BACKENDS, describe_cpu
from tilewright.compiler.errors import ConfigError, RequestError, allowed, one_line
from tilewright.compiler.json_lines import check_writable
from tilewright.compiler.precision import load_precision
from tilewright.models import ShapeName, find_model_or_shape

if TYPE_CHECKING:
    from tilewright.models import LoadedModel

DEFAULT_PAIRS = (
    *("all-bfp8=Q8_0", "all-bfp4=Q4_0", "all-q40=Q4_0", "all-q80=Q8_0"),
    "bf16=BF16",
)
KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")
_FOUR_BITS = ("Q4_0", "Q4_1")
_OPENVINO_KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16")
_ONNX_WEIGHTS = "int4"
_BACKENDS = dict(zip(CPU_BACKENDS, OURS, strict=True))
_ROOT = Path(__file__).resolve().parents[2]
_WORKER = "bench.peers.tilewright_worker"


@dataclass(frozen=True, slots=True)
class Pair:
    """A configuration of ours, and the GGUF type it is compared with."""

    precision: str
    kind: str


def read_pair(text: str) -> Pair:
    """Read a pair ``PRECISION=TYPE``. Raises ConfigError for what is none."""
    precision, separator, kind = text.rpartition("=")
    if not separator or not precision or kind.upper() not in KINDS:
        raise ConfigError(f"pair {text!r}; {allowed(f'PRECISION={kind}' for kind in KINDS)}")
    load_precision(precision)
    return Pair(precision, kind.upper())


def _peer(name: str) -> str:
    return PEERS[name].name


def _onnx_folder(text: str) -> Path:
    path = Path(text)
    if not (path / "genai_config.json").is_file():
        builder = "python -m onnxruntime_genai.models.builder -i FOLDER -o DIR -p int4 -e cpu"
        raise ConfigError(f"{text}: holds no genai_config.json; allowed: a folder of {builder}")
    return path.resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The command line of ``tilewright compare``; ``peers``: names in `PEERS`."""

    model: str | None = option(
        "as of tilewright run; some peers need a GGUF file, as which a shape of Llama is written",
        metavar="PATH",
    )
    pairs: tuple[Pair, ...] = option(
        f"a configuration and the GGUF type beside it: {', '.join(KINDS)} "
        f"(default: {' '.join(DEFAULT_PAIRS)})",
        default=tuple(map(read_pair, DEFAULT_PAIRS)),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    peers: tuple[str, ...] = option(
        f"of {', '.join(PEERS)}", default=tuple(PEERS), nargs="*", metavar="NAME", type=_peer
    )
    backends: tuple[str, ...] = option(
        f"of the target cpu: {', '.join(_BACKENDS)} (default: both)",
        default=("onnxruntime", "native"),
        metavar="NAME",
        choices=tuple(_BACKENDS),
    )
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("in turn (5)", default=5, type=integer(1, 1000))
    prefill: tuple[int, ...] = option(
        "lengths of prompts", default=(128, 512), metavar="TOKENS", type=integer(1, 1 << 20)
    )
    context: int = option(
        "a prompt that is decoded after", default=128, metavar="TOKENS", type=integer(1, 1 << 20)
    )
    users: tuple[int, ...] = option(
        "that decode together (default: 8 32)",
        default=(8, 32),
        nargs="*",
        metavar="N",
        type=integer(2, 256),
    )
    decode_tokens: int = option("so many", default=128, metavar="N", type=integer(3, 1 << 20))
    onnx_genai_folder: Path | None = option(
        "as its builder wrote it (default: build one)", metavar="DIR", type=_onnx_folder
    )
    timeout: float = option(
        "of one answer", default=600.0, metavar="S", type=real(0, 1e6, above=True)
    )
    json: str | None = option("write every repeat, versions and host", metavar="FILE")

    @property
    def plan(self) -> Plan:
        """What is measured in every round."""
        return Plan(
            prefill_lengths=tuple(dict.fromkeys(self.prefill)),
            context=self.context,
            num_decoded=self.decode_tokens,
            num_rounds=self.rounds,
            users=tuple(dict.fromkeys(self.users)),
        )

    @property
    def num_threads(self) -> int:
        """The threads that every engine computes with."""
        return self.threads or describe_cpu().num_cores


def read_options(argv: Sequence[str]) -> CompareOptions:
    """Read and check the command line. Raises TilewrightError."""
    options = parse(
        CompareOptions,
        argv,
        prog="tilewright compare",
        description="Measure Tilewright's CPU target and its peers in turn on the same weights.",
    )
    if options.json is not None:
        check_writable(options.json)
    if options.model is not None and is_compiled(options.model):
        raise ConfigError(
            f"{options.model}: a compiled folder has no weights for others to run; "
            "allowed: a checkpoint"
        )
    found = find_model_or_shape(options.model)
    if isinstance(found, ShapeName):
        from bench.peers.shape_gguf import cached_shape

        found = cached_shape(found, cache_dir() / "peers")
    return replace(options, model=str(found.resolve()))


def main(argv: list[str]) -> int:
    """Run ``tilewright compare``; returns 1 where a configuration of ours was not measured."""
    options = read_options(argv)
    from bench.ceilings import read_bandwidth
    from bench.peers.report import print_report, report_record
    from tilewright.compiler.commands.console import compile_progress, err, out
    from tilewright.compiler.commands.sweep.files import write_text
    from tilewright.models import load_model

    model = load_model(Path(str(options.model)))
    limit = model.config.max_positions
    if options.plan.max_context > limit:
        raise RequestError(
            f"{options.plan.max_context} tokens of prompt and answer; "
            f"allowed by this model's context: {limit} together"
        )
    contestants, versus = line_up(model, options)
    with compile_progress(err()) as progress:
        bandwidths = measure_all(
            contestants,
            options.plan,
            tokens=model.tokenizer.encode(bench_text("long.txt")),
            bandwidth=lambda: read_bandwidth(options.num_threads),
            report=progress,
        )
    record = report_record(model, contestants, versus, options=options, bandwidths=bandwidths)
    print_report(out(), record)
    if options.json is not None:
        write_text(options.json, json.dumps(record, indent=1) + "\n")
    return int(any(each.failure for each in contestants if each.engine in OURS))


def line_up(
    model: LoadedModel, options: CompareOptions
) -> tuple[list[Contestant], list[tuple[Contestant, Contestant]]]:
    """The contestants, ours each before its peers, and who is compared with whom."""
    found: dict[tuple[str, str], Contestant] = {}
    versus = []
    starts = _Starts(model, options)

    def enter(engine: str, weights: str) -> Contestant:
        key = (engine, weights)
        if key not in found:
            many = engine in OURS or PEERS[engine].serves_many
            start = functools.partial(starts.start, engine, weights)
            found[key] = Contestant(engine, weights, start, serves_many=many)
        return found[key]

    for pair in dict.fromkeys(options.pairs):
        ours = [enter(_BACKENDS[each], pair.precision) for each in options.backends]
        rivals = [("llama.cpp", pair.kind)]
        if pair.kind in _FOUR_BITS:
            rivals.append(("onnx-genai", _ONNX_WEIGHTS))
        if pair.kind in _OPENVINO_KINDS:
            rivals.append(("openvino", pair.kind))
        known = [enter(*rival) for rival in rivals if rival[0] in options.peers]
        versus += [(own, rival) for own in ours for rival in known]
    return list(found.values()), versus


class _Starts:
    """How each engine's worker is started: its files first, then its process."""

    def __init__(self, model: LoadedModel, options: CompareOptions) -> None:
        self._model = model
        self._options = options
        self._source = Path(str(options.model))
        self._folder = cache_dir() / "peers"

    def start(self, engine: str, weights: str) -> Worker:
        """The worker of an engine. Raises WorkerError where it cannot be had here."""
        settings: dict[str, Any] = {
            "engine": engine,
            "num_threads": self._options.num_threads,
            "max_context": self._options.plan.max_context,
            "max_users": self._options.plan.max_users,
        }
        missing = PEERS[engine].missing() if engine in PEERS else None
        if missing is not None:
            raise WorkerError(missing)
        try:
            settings |= self._files(engine, weights)
        except Exception as error:  # libraries of peers raise what they like
            raise WorkerError(one_line(error)) from None
        command = (*PYTHON, "-m", _WORKER, json.dumps(settings))
        search = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"PYTHONPATH": search, "OMP_NUM_THREADS": str(self._options.num_threads)}
        return Worker(command, environment=environment, timeout_s=self._options.timeout)

    def _files(self, engine: str, weights: str) -> dict[str, Any]:
        """What the engine reads, made where there is none yet."""
        source, given = self._source, self._options.onnx_genai_folder
        is_tied = self._model.config.tie_embeddings
        if engine in OURS:
            return {"path": str(source), "precision": weights}
        if engine == "onnx-genai" and given is not None:
            return {"path": str(given), "is_tied": is_tied}
        if engine == "onnx-genai":
            from bench.peers.onnx_folder import cached_onnx_folder

            path = cached_onnx_folder(
                self._model, source, content_hash=self._content_hash, folder=self._folder
            )
            return {"path": str(path), "is_tied": is_tied}
        if source.suffix.lower() != ".gguf":
            raise ConfigError(
                f"{source.name} is no GGUF file: convert it with llama.cpp's convert_hf_to_gguf.py"
            )
        from bench.peers.gguf_copy import cached_gguf

        path = cached_gguf(source, weights, content_hash=self._content_hash, folder=self._folder)
        return {"path": str(path)}

    @functools.cached_property
    def _content_hash(self) -> str:
        found: str = self._model.checkpoint.content_hash()
        return found
