"""dllama files of random weights: known shapes with 49,152 tokens, written in seconds."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from tilewright.models.checkpoints.dllama.header import (
    TENSOR_TYPES,
    DllamaHeader,
    DllamaTensor,
    tensors,
    write_header,
)

_NUM_TOKENS = 49_152

SHAPES = {
    # hidden, intermediate, layers, heads, KV heads
    "145m": (512, 1536, 30, 8, 4),
    "1.17b": (2048, 8192, 16, 32, 8),
    "8b": (4096, 14336, 32, 32, 8),
}


def write_files(shape: str, folder: Path) -> Path:
    """The ``.m`` file of a shape in q40, beside a ``.t`` file to which every byte is a token."""
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
    """The bytes, then tokens of as many letters as no text has; the last one begins a text."""
    names = [bytes([each]) for each in range(256)]
    names += [f"<{each:06d}>".encode() for each in range(256, _NUM_TOKENS)]
    pairs = [(0, 1), (1, len(names)), (2, 8), (3, len(names) - 1), (9, 1), (10, 0)]
    packed = struct.pack("<ii", 0x567124, 8 + 8 * len(pairs))
    packed += b"".join(struct.pack("<ii", *pair) for pair in pairs)
    packed += struct.pack("<i", len(names) - 1)
    rows = (struct.pack("<fI", -float(i), len(name)) + name for i, name in enumerate(names))
    return packed + b"".join(rows)
