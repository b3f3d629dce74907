"""``python -m bench bench-nodes``: tokens per second with CPU nodes on one machine.

The nodes share a memory bus, unlike machines. See docs/multi_gpu.md.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import TILEWRIGHT, keeper
from tilewright.errors import ConfigError
from tilewright.models.checkpoints.dllama.header import (
    TENSOR_TYPES,
    DllamaHeader,
    DllamaTensor,
    tensors,
    write_header,
)
from tilewright.options.arguments import integer, option, parse

_SECONDS, _NUM_TOKENS = 900.0, 49_152
SHAPES = {
    # hidden, intermediate, layers, heads, KV heads
    "145m": (512, 1536, 30, 8, 4),
    "1.17b": (2048, 8192, 16, 32, 8),
    "8b": (4096, 14336, 32, 32, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    shape: str = option("shape with random weights in q40", default="1.17b", choices=tuple(SHAPES))
    model: str | None = option("model instead of a shape", metavar="PATH")
    nodes: tuple[int, ...] = option("node counts", default=(1, 2, 4), type=integer(1, 16))
    threads: int = option("threads for each node", default=2, type=integer(1, 64))
    wires: tuple[str, ...] = option(
        "message formats for partial sums", default=("q80",), choices=("f32", "bf16", "q80")
    )
    prompt_tokens: int = option("prompt length in letters", default=64, type=integer(1, 4000))
    steps: int = option("prompt and answer tokens", default=160, type=integer(1, 4000))
    repeats: int = option("rounds", default=1, type=integer(1, 100))
    results: Path | None = option("append rows, as JSON lines", metavar="FILE", type=Path)


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-nodes`` and return the exit code."""
    words = "Measure a model over CPU nodes."
    given = parse(_Options, argv, prog="python -m bench bench-nodes", description=words)
    keep = keeper(given.results)
    with tempfile.TemporaryDirectory(prefix="tilewright-nodes-") as folder:
        model = Path(given.model) if given.model else write_files(given.shape, Path(folder))
        print("nodes wire prompt t/s decode t/s kB/tok ms/tok")
        for _ in range(given.repeats):
            for count in given.nodes:
                for wire in given.wires if count > 1 else ("",):
                    row = _run(given, model, count, wire)
                    rates = f"{row['prompt_rate']:>10.1f} {row['decode_rate']:>10.1f}"
                    sent = f"{row['sent_kb']:>6.1f} {row['exchange_ms']:>6.2f}"
                    print(f"{count:>5} {wire:>4} {rates} {sent}")
                    keep(row)
    return 0


def _run(given: _Options, model: Path, count: int, wire: str) -> dict[str, Any]:
    options = ["--nthreads", str(given.threads), "--steps", str(given.steps)]
    options += ["--buffer-float-type", wire] if wire else []
    options += ["--nodes", str(count)]
    command = [*TILEWRIGHT, "run", "--model", str(model), *options]
    command += ["--prompt", "a" * given.prompt_tokens]
    said = _output(command, {"TILEWRIGHT_TOKEN": secrets.token_hex(16)})
    return {
        **{"model": model.stem, "nodes": count, "threads": given.threads, "link": "free"},
        **{"wire": wire, **_figures(said), "prompt_tokens": given.prompt_tokens},
        "command": shlex.join(["tilewright", "run", "--model", model.name, *options]),
    }


def _output(command: list[str], token: dict[str, str]) -> str:
    surroundings: dict[str, Any] = {"env": {**os.environ, **token}, "timeout": _SECONDS}
    done = subprocess.run(command, capture_output=True, check=False, **surroundings)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"nodes ended with {done.returncode}: {''.join(last)}")
    return done.stdout.decode(errors="replace")


def _figures(said: str) -> dict[str, float]:
    """Return tokens per second, and kB and ms per token in exchanges."""
    lines = [line.split() for line in said.splitlines()]
    rates = [float(line[1]) for line in lines if line[:1] == ["tokens/s:"]]
    sent = [float(line[1]) for line in lines if line[:1] == ["sent:"] and line[2:] == ["kB/tok"]]
    waited = [float(line[1]) for line in lines if line[:1] == ["time:"] and line[2:] == ["ms/tok"]]
    found = {"prompt_rate": rates[-2], "decode_rate": rates[-1]}
    return found | {"sent_kb": (sent or [0.0])[-1], "exchange_ms": (waited or [0.0])[-1]}


def write_files(shape: str, folder: Path) -> Path:
    """Write a dllama model with random weights in q40, and a tokenizer with byte tokens."""
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    header = DllamaHeader(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=_NUM_TOKENS,
        max_positions=4096,
        weights="Q4_0",
        norm_eps=1e-5,
        rope_theta=500_000,
        pairs_adjacent=True,
    )
    path = folder / f"dllama_model_{shape}_q40.m"
    (folder / f"dllama_tokenizer_{shape}.t").write_bytes(_tokenizer())
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(write_header(header, path))
        for tensor in tensors(header):
            file.write(_random(tensor, generator))
    return path


def _random(tensor: DllamaTensor, generator: np.random.Generator) -> bytes:
    count = math.prod(tensor.shape)
    if tensor.dtype == "F32":
        if len(tensor.shape) == 1:
            return np.ones(count, dtype=np.float32).tobytes()
        return (generator.standard_normal(count, dtype=np.float32) * 0.02).tobytes()
    _, block, size = TENSOR_TYPES[tensor.dtype]
    blocks = generator.integers(0, 256, (count // block, size), dtype=np.uint8)
    scale = np.float16(0.1 / math.sqrt(tensor.shape[-1]))
    blocks[:, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return blocks.tobytes()


def _tokenizer() -> bytes:
    """Return the bytes as tokens, then unused names. The last token begins a text."""
    names = [bytes([each]) for each in range(256)]
    names += [f"<{each:06d}>".encode() for each in range(256, _NUM_TOKENS)]
    pairs = [(0, 1), (1, len(names)), (2, 8), (3, len(names) - 1), (9, 1), (10, 0)]
    packed = struct.pack("<ii", 0x567124, 8 + 8 * len(pairs))
    packed += b"".join(struct.pack("<ii", *pair) for pair in pairs)
    packed += struct.pack("<i", len(names) - 1)
    rows = (struct.pack("<fI", -float(i), len(name)) + name for i, name in enumerate(names))
    return packed + b"".join(rows)
