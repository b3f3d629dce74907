"""``tilewright compare``: the CPU target beside llama.cpp and the GenAI engines, in turn."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers import PEERS
from bench.peers.rounds import Contestant, Plan, measure_all
from bench.peers.tilewright_worker import OURS
from bench.peers.worker import Worker, WorkerError
from tilewright.compiler.artifacts.places import cache_dir, is_compiled
from tilewright.compiler.bench.prompts import bench_text
from tilewright.compiler.bench.results import check_writable
from tilewright.compiler.commands.arguments import Parser, integer, real
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.errors import ConfigError, RequestError, allowed, one_line
from tilewright.compiler.precision import load_precision
from tilewright.models import find_model

if TYPE_CHECKING:
    from tilewright.models import LoadedModel

DEFAULT_PAIRS = ("all-bfp8=Q8_0", "all-bfp4=Q4_0", "all-q40=Q4_0", "all-q80=Q8_0")
KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")
_FOUR_BITS = ("Q4_0", "Q4_1")
_OPENVINO_KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16")
_ONNX_WEIGHTS = "int4"
_ROOT = Path(__file__).resolve().parents[2]
_WORKER = "bench.peers.tilewright_worker"


@dataclass(frozen=True, slots=True)
class Pair:
    """A configuration of ours, and the GGUF type it is compared with."""

    precision: str
    kind: str


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """A checked command line; ``peers``: names in `PEERS`."""

    model_path: Path
    pairs: tuple[Pair, ...]
    peers: tuple[str, ...]
    plan: Plan
    num_threads: int
    onnx_folder: Path | None
    timeout_s: float
    json_path: Path | None


def parser() -> argparse.ArgumentParser:
    """The options of ``tilewright compare`` and ``demo/compare_peers.py``."""
    found = Parser(
        prog="tilewright compare",
        description="Measure Tilewright's CPU target and its peers in turn on the same weights.",
    )
    found.add_argument(
        "--model", metavar="PATH", help="as of tilewright run; some peers need a GGUF file"
    )
    found.add_argument(
        "--pairs",
        nargs="+",
        metavar="PRECISION=TYPE",
        default=list(DEFAULT_PAIRS),
        help=f"a configuration and the GGUF type beside it: {', '.join(KINDS)} "
        f"(default: {' '.join(DEFAULT_PAIRS)})",
    )
    found.add_argument(
        "--peers", nargs="*", metavar="NAME", default=list(PEERS), help=f"of {', '.join(PEERS)}"
    )
    found.add_argument("--threads", type=integer(1, 1024), help="CPU threads (default: all cores)")
    found.add_argument("--rounds", type=integer(1, 1000), default=5)
    found.add_argument(
        "--prefill", nargs="+", type=integer(1, 1 << 20), metavar="TOKENS", default=[128, 512]
    )
    found.add_argument("--context", type=integer(1, 1 << 20), metavar="TOKENS", default=128)
    found.add_argument("--decode-tokens", type=integer(3, 1 << 20), metavar="N", default=128)
    found.add_argument(
        "--onnx-genai-folder", metavar="DIR", help="as its builder wrote it (default: build one)"
    )
    found.add_argument(
        "--timeout", type=real(0, 1e6, above=True), metavar="S", default=600.0, help="of one answer"
    )
    found.add_argument("--json", metavar="FILE", help="write every repeat, versions and host")
    return found


def read_options(argv: Sequence[str]) -> CompareOptions:
    """The checked command line. Raises TilewrightError."""
    arguments = parser().parse_args(list(argv))
    pairs = tuple(dict.fromkeys(_pair(text) for text in arguments.pairs))
    for pair in pairs:
        load_precision(pair.precision)
    peers = tuple(dict.fromkeys(PEERS[name].name for name in arguments.peers))
    folder = arguments.onnx_genai_folder
    if folder is not None and not (Path(folder) / "genai_config.json").is_file():
        raise ConfigError(
            f"{folder}: holds no genai_config.json; allowed: a folder of {_builder()}"
        )
    if arguments.json is not None:
        check_writable(arguments.json)
    if arguments.model is not None and is_compiled(arguments.model):
        raise ConfigError(
            f"{arguments.model}: a compiled folder has no weights for others to run; "
            "allowed: a checkpoint"
        )
    model_path = find_model(arguments.model)
    return CompareOptions(
        model_path=model_path.resolve(),
        pairs=pairs,
        peers=peers,
        plan=Plan(
            prefill_lengths=tuple(dict.fromkeys(arguments.prefill)),
            context=arguments.context,
            num_decoded=arguments.decode_tokens,
            num_rounds=arguments.rounds,
        ),
        num_threads=arguments.threads or describe_cpu().num_cores,
        onnx_folder=None if folder is None else Path(folder).resolve(),
        timeout_s=arguments.timeout,
        json_path=None if arguments.json is None else Path(arguments.json),
    )


def main(argv: list[str]) -> int:
    """Run the command; returns 1 where one of our own configurations could not be measured."""
    options = read_options(argv)
    from bench.peers.report import print_report, report_record
    from tilewright.compiler.bench.bandwidth import read_bandwidth
    from tilewright.compiler.commands.console import compile_progress, err, out
    from tilewright.models import load_model

    model = load_model(options.model_path)
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
    if options.json_path is not None:
        _write_json(options.json_path, record)
    return int(any(each.failure for each in contestants if each.engine == OURS))


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
            found[key] = Contestant(engine, weights, lambda: starts.start(engine, weights))
        return found[key]

    for pair in options.pairs:
        ours = enter(OURS, pair.precision)
        rivals = [("llama.cpp", pair.kind)]
        if pair.kind in _FOUR_BITS:
            rivals.append(("onnx-genai", _ONNX_WEIGHTS))
        if pair.kind in _OPENVINO_KINDS:
            rivals.append(("openvino", pair.kind))
        versus += [(ours, enter(*rival)) for rival in rivals if rival[0] in options.peers]
    return list(found.values()), versus


class _Starts:
    """How each engine's worker is started: its files first, then its process."""

    def __init__(self, model: LoadedModel, options: CompareOptions) -> None:
        self._model = model
        self._options = options
        self._folder = cache_dir() / "peers"

    def start(self, engine: str, weights: str) -> Worker:
        """The worker of an engine. Raises WorkerError where it cannot be had here."""
        settings: dict[str, Any] = {
            "engine": engine,
            "num_threads": self._options.num_threads,
            "max_context": self._options.plan.max_context,
        }
        missing = PEERS[engine].missing() if engine in PEERS else None
        if missing is not None:
            raise WorkerError(missing)
        try:
            settings |= self._files(engine)(weights)
        except Exception as error:  # libraries of peers raise what they like
            raise WorkerError(one_line(error)) from None
        # -P: a folder called like one of ours in the current one is not imported
        command = (sys.executable, "-P", "-m", _WORKER, json.dumps(settings))
        search = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        environment = {
            "PYTHONPATH": search,
            "OMP_NUM_THREADS": str(self._options.num_threads),
        }
        return Worker(command, environment=environment, timeout_s=self._options.timeout_s)

    @functools.cached_property
    def _content_hash(self) -> str:
        found: str = self._model.checkpoint.content_hash()
        return found

    def _files(self, engine: str) -> Callable[[str], dict[str, Any]]:
        return {OURS: self._ours, "onnx-genai": self._onnx}.get(engine, self._gguf)

    def _ours(self, precision: str) -> dict[str, Any]:
        return {"path": str(self._options.model_path), "precision": precision}

    def _gguf(self, kind: str) -> dict[str, Any]:
        from bench.peers.gguf_copy import cached_gguf

        source = self._options.model_path
        if source.suffix.lower() != ".gguf":
            raise ConfigError(
                f"{source.name} is no GGUF file: convert it with llama.cpp's convert_hf_to_gguf.py"
            )
        path = cached_gguf(source, kind, content_hash=self._content_hash, folder=self._folder)
        return {"path": str(path)}

    def _onnx(self, weights: str) -> dict[str, Any]:
        from bench.peers.onnx_folder import cached_onnx_folder

        path = self._options.onnx_folder
        if path is None:
            path = cached_onnx_folder(
                self._model,
                self._options.model_path,
                content_hash=self._content_hash,
                folder=self._folder,
            )
        return {"path": str(path), "is_tied": self._model.config.tie_embeddings}


def _write_json(path: Path, record: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _pair(text: str) -> Pair:
    precision, separator, kind = text.rpartition("=")
    if not separator or not precision or kind.upper() not in KINDS:
        raise ConfigError(f"pair {text!r}; {allowed(f'PRECISION={kind}' for kind in KINDS)}")
    return Pair(precision, kind.upper())


def _builder() -> str:
    return "python -m onnxruntime_genai.models.builder -i FOLDER -o DIR -p int4 -e cpu"
