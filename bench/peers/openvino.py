"""OpenVINO GenAI as an engine of a comparison: it reads a GGUF file itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from bench.peers.gguf_copy import gguf_sizes
from bench.peers.worker import Generated, Loaded


class OpenVino:
    """A pipeline on a GGUF file, with its default (paged) attention."""

    def __init__(self, path: Path, *, num_threads: int) -> None:
        # By default a prompt seen before is not computed again: that would be no prefill.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.LLMPipeline(
            str(path), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=num_threads
        )
        self._path = path

    def loaded(self) -> Loaded:
        """The bytes of the file's tensors; OpenVINO keeps blocks of its own of the same bits."""
        return gguf_sizes(self._path)

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """Prefill ``tokens``, then choose ``num_tokens`` greedily; a streamer hears each."""
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens = num_tokens
        options.ignore_eos = True
        options.do_sample = False
        options.apply_chat_template = False
        clock = _Clock()
        prompt = openvino.Tensor(np.asarray([tokens], dtype=np.int64))
        clock.start()
        self._pipeline.generate(prompt, options, clock)
        return Generated(tuple(clock.tokens), tuple(clock.times))


class _Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Notes every token and its time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Let the times of tokens count from now on."""
        self._started = time.perf_counter()

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        """Note a token, or several that come at once."""
        now = time.perf_counter() - self._started
        found = [token] if isinstance(token, int) else list(token)
        self.tokens += found
        self.times += [now] * len(found)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing: every token was noted as it came."""
