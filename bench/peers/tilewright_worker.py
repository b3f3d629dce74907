"""The process of one engine of ``bench compare``: opens it, then answers until told to end.

``python -m bench.peers.tilewright_worker SETTINGS``, a JSON object; not for users.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.worker import Engine, Generated, Loaded, serve, take_standard_output

OURS = {"tilewright": "cpu", "tilewright native": "cpu-native"}
"""Our own engines, and the full names of their targets."""


def open_engine(settings: dict[str, Any]) -> Engine:
    """The engine that ``settings`` names; its library is imported only now."""
    name, path, num_threads = settings["engine"], Path(settings["path"]), settings["num_threads"]
    if name == "llama.cpp":
        from bench.peers.llama_cpp import LlamaCpp

        sizes = {"max_context": settings["max_context"], "max_users": settings["max_users"]}
        return LlamaCpp(path, num_threads=num_threads, **sizes)
    if name == "onnx-genai":
        from bench.peers.onnx_genai import OnnxGenai

        return OnnxGenai(path, num_threads=num_threads, is_tied=settings["is_tied"])
    if name == "openvino":
        from bench.peers.openvino import OpenVino

        return OpenVino(path, num_threads=num_threads)
    return Tilewright(path, settings, target=OURS[name])


class Tilewright:
    """A model compiled for the CPU, run as ``tilewright run`` runs it."""

    def __init__(self, path: Path, settings: dict[str, Any], *, target: str) -> None:
        from tilewright.compiler.artifacts.cache import ProgramCache
        from tilewright.compiler.artifacts.program import compile_cached
        from tilewright.compiler.precision import load_precision
        from tilewright.compiler.targets.interface.base import CompileOptions
        from tilewright.models import load_model

        options = CompileOptions(
            max_batch=settings["max_users"],
            max_context=settings["max_context"],
            num_threads=settings["num_threads"],
        )
        self._compiled = compile_cached(
            load_model(path),
            load_precision(settings["precision"]),
            ProgramCache.default(),
            target=target,
            options=options,
        )

    def loaded(self) -> Loaded:
        """The weights as the target holds them, all of them and those that a step reads."""
        from tilewright.evaluate.measure.roofline import compiled_weight_bytes

        step_bytes = int(sum(compiled_weight_bytes(self._compiled).values()))
        return Loaded(self._compiled.executable.memory().weights, step_bytes)

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """Prefill ``tokens`` into an empty state, then choose ``num_tokens`` greedily."""
        return self.generate_together(tokens, num_tokens, 1)

    def generate_together(
        self, tokens: Sequence[int], num_tokens: int, num_users: int
    ) -> Generated:
        """Do what ``generate`` does for so many users of one prompt at a time."""
        from tilewright.evaluate.measure.timing import OFFLINE
        from tilewright.runtime.loop import EngineLoop
        from tilewright.runtime.request import Request, SamplingParams

        sampling = SamplingParams(max_tokens=num_tokens)
        requests = [Request(user, tuple(tokens), sampling) for user in range(num_users)]
        started = time.perf_counter()
        EngineLoop(self._compiled.executable, policy=OFFLINE).generate(requests)
        every = zip(*(request.token_times for request in requests), strict=True)
        return Generated(tuple(requests[0].output), tuple(max(at) - started for at in every))


def main(argv: list[str]) -> int:
    """Serve on standard input and output; returns the exit code."""
    answers = take_standard_output()
    settings = json.loads(argv[0])
    return serve(lambda: open_engine(settings), sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
