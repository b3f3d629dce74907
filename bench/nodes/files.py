"""dllama files of random weights: known shapes with SmolLM2's 49,152 tokens, written in seconds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tilewright.models import find_model, load_model
from tilewright.models.checkpoints.dllama_header import (
    TENSOR_TYPES,
    DllamaHeader,
    DllamaTensor,
    tensors,
    write_header,
)
from tilewright.models.tokenizer.load import read_vocabulary
from tilewright.models.tokenizer.vocabulary_dllama import pack_tokenizer

SHAPES = {
    # hidden, intermediate, layers, heads, KV heads
    "145m": (512, 1536, 30, 8, 4),
    "1.17b": (2048, 8192, 16, 32, 8),
    "8b": (4096, 14336, 32, 32, 8),
}


def write_files(shape: str, folder: Path) -> Path:
    """The ``.m`` file of a shape in q40, beside SmolLM2's tokenizer as a ``.t`` file."""
    vocabulary = read_vocabulary(load_model(find_model(None)).checkpoint.tokenizer_source)
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    header = DllamaHeader(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocabulary.backend.get_vocab_size(),
        max_positions=4096,
        weights="Q4_0",
        norm_eps=1e-5,
        rope_theta=500_000,
        pairs_adjacent=True,
    )
    path = folder / f"dllama_model_{shape}_q40.m"
    (folder / f"dllama_tokenizer_{shape}.t").write_bytes(pack_tokenizer(vocabulary))
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
