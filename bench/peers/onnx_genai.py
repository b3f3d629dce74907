"""ONNX Runtime GenAI as an engine of a comparison: a folder that its model builder wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai

from bench.peers.worker import Generated, Loaded


class OnnxGenai:
    """ONNX Runtime GenAI on a built folder. ``is_tied``: the head's matrix is the embedding's."""

    def __init__(self, path: Path, *, num_threads: int, is_tied: bool) -> None:
        config = onnxruntime_genai.Config(str(path))
        session = {"intra_op_num_threads": num_threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)
        self._path = path
        self._is_tied = is_tied

    def loaded(self) -> Loaded:
        """The weight file's bytes; a step reads all of it where the embedding is the head."""
        weight_bytes = sum(file.stat().st_size for file in self._path.glob("*.onnx*"))
        return Loaded(weight_bytes, weight_bytes if self._is_tied else None)

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """Prefill ``tokens`` into an empty state, then choose ``num_tokens`` greedily."""
        length = len(tokens) + num_tokens
        options = onnxruntime_genai.GeneratorParams(self._model)
        # no end token is chosen before the least length
        options.set_search_options(max_length=length, min_length=length, do_sample=False)
        output, times = [], []
        prompt = np.asarray(tokens, dtype=np.int32)
        started = time.perf_counter()
        generator = onnxruntime_genai.Generator(self._model, options)
        generator.append_tokens(prompt)
        for _ in range(num_tokens):
            generator.generate_next_token()
            output.append(int(generator.get_next_tokens()[0]))
            times.append(time.perf_counter() - started)
        return Generated(tuple(output), tuple(times))
