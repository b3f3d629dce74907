"""An OpenAI endpoint of an engine without a server: ONNX Runtime GenAI or OpenVINO GenAI.

``python -m bench.baselines.genai_server ENGINE PATH --threads N --port P`` streams completions of
token ids greedily, one request at a time. End tokens are ignored.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

Generate = Callable[[Sequence[int], int], Iterator[object]]
"""Yields once a token, for a prompt and a number of tokens."""


def onnx_genai(path: Path, threads: int) -> Generate:
    """Open a folder that the model builder of ONNX Runtime GenAI wrote."""
    import numpy as np
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(path))
    session = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = onnxruntime_genai.Model(config)

    def generate(tokens: Sequence[int], count: int) -> Iterator[object]:
        length = len(tokens) + count
        options = onnxruntime_genai.GeneratorParams(model)
        options.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, options)
        generator.append_tokens(np.asarray(tokens, dtype=np.int32))
        for _ in range(count):
            generator.generate_next_token()
            yield generator.get_next_tokens()[0]

    return generate


def openvino(path: Path, threads: int) -> Generate:
    """Open a GGUF file in OpenVINO GenAI, without its prefix cache."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        str(path), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
    )

    def generate(tokens: Sequence[int], count: int) -> Iterator[object]:
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos = count, True
        options.do_sample = options.apply_chat_template = False
        found: SimpleQueue[object] = SimpleQueue()

        class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: int | Sequence[int]) -> Any:
                for each in [token] if isinstance(token, int) else token:
                    found.put(each)
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                """Nothing is left to send."""

        prompt = openvino.Tensor(np.asarray([tokens], dtype=np.int64))
        given = prompt, options, Streamer()
        threading.Thread(target=pipeline.generate, args=given, daemon=True).start()
        for _ in range(count):
            yield found.get()

    return generate


ENGINES: dict[str, Callable[[Path, int], Generate]] = {
    "onnx-genai": onnx_genai,
    "openvino": openvino,
}


def handler(generate: Generate, lock: threading.Lock) -> type[BaseHTTPRequestHandler]:
    """Return a request handler for ``/health`` and ``/v1/completions``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            tokens, count = body["prompt"], body["max_tokens"]
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            with lock:
                for _ in generate(tokens, count):
                    self._send({"choices": [{"text": "x"}]})
            usage = {"prompt_tokens": len(tokens), "completion_tokens": count}
            self._send({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def log_message(self, *words: object) -> None:
            """Log nothing."""

    return Handler


def main(argv: Sequence[str]) -> int:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args(argv)
    generate = ENGINES[given.engine](given.path, given.threads)
    made = handler(generate, threading.Lock())
    ThreadingHTTPServer((given.host, given.port), made).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
