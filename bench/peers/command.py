"""``python -m bench compare``: the CPU target beside llama.cpp and the GenAI engines, in turn."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.in_turn import with_checkout
from bench.peers import PEERS
from bench.peers.options import CompareOptions, read_options
from bench.peers.records import write_part
from bench.peers.rounds import Contestant, measure_all
from bench.peers.tilewright_worker import OURS
from bench.peers.worker import Worker, WorkerError
from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.errors import ConfigError, RequestError, one_line
from tilewright.evaluate.cases.prompts import bench_text
from tilewright.utils.child_process import PYTHON

if TYPE_CHECKING:
    from tilewright.models import LoadedModel

_FOUR_BITS = ("Q4_0", "Q4_1")
_OPENVINO_KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16")
_ONNX_WEIGHTS = "int4"
_BACKENDS = dict(zip(CPU_BACKENDS, OURS, strict=True))
_WORKER = "bench.peers.tilewright_worker"


def main(argv: list[str]) -> int:
    """Run ``python -m bench compare``; returns 1 where a configuration of ours was not measured."""
    failed = False
    for options in read_options(argv):
        record, missed = _measure(options)
        failed |= missed
        if options.json is not None:
            write_part(Path(options.json), options.part, record)
    return int(failed)


def _measure(options: CompareOptions) -> tuple[dict[str, Any], bool]:
    """A part's record, printed as tables, and whether a configuration of ours is missing in it."""
    from bench.ceilings import read_bandwidth
    from bench.peers.report import print_report, report_record
    from tilewright.cli.terminal.console import compile_progress, err, out
    from tilewright.models import load_model

    model = load_model(Path(options.model))
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
    return record, any(each.failure for each in contestants if each.engine in OURS)


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
        self._source = Path(options.model)
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
        environment = {**with_checkout(), "OMP_NUM_THREADS": str(self._options.num_threads)}
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
