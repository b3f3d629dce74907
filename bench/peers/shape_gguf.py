"""A named shape of Llama with random weights as a GGUF file, for engines that read GGUF.

Blocks of Q8_0 with random codes: its speed is a model's, its text means nothing.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from bench.peers.worker import cache_name
from tilewright.errors import ConfigError
from tilewright.models.config import ModelConfig
from tilewright.models.shapes import ShapeName, shape_config

_KIND = gguf.GGMLQuantizationType.Q8_0
_BLOCK, _BLOCK_BYTES = gguf.GGML_QUANT_SIZES[_KIND]
_MAX_CONTEXT = 8192


def cached_shape(name: ShapeName, folder: Path) -> Path:
    """The file of a shape in a cache folder, written if it is not there; whole or not at all.

    Raises:
        ConfigError: for a shape that is no Llama, or a file that cannot be written.
    """
    config = shape_config(name)
    if config.model_type != "llama":
        raise ConfigError(f"{name}: {config.model_type} is not written as GGUF; allowed: a Llama")
    path = folder / f"{cache_name(Path(config.name), str(name), metadata.version('gguf'))}.gguf"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            whole = Path(scratch) / path.name
            _write(config, whole)
            whole.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _write(config: ModelConfig, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    writer.add_name(config.name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(min(_MAX_CONTEXT, config.max_positions))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q8_0))
    _add_vocabulary(writer, config.vocab_size)
    rng, matrices = np.random.default_rng(0), _matrices(config)
    norms = [f"blk.{i}.{each}_norm.weight" for i in range(config.num_layers) for each in _NORMS]
    for name, (rows, columns) in matrices.items():
        size = rows * columns // _BLOCK * _BLOCK_BYTES
        shape = rows, columns // _BLOCK * _BLOCK_BYTES
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, _KIND)
    ones = np.ones(config.hidden_size, np.float32)
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor_info(name, ones.shape, ones.dtype, ones.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for rows, columns in matrices.values():
            writer.write_tensor_data(_random_rows(rng, rows, columns))
        for _ in (*norms, "output_norm.weight"):
            writer.write_tensor_data(ones)
    finally:
        writer.close()


_NORMS = ("attn", "ffn")


def _matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns by name, as the file has them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {"token_embd.weight": (config.vocab_size, hidden)}
    if not config.tie_embeddings:
        found["output.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        sizes = {
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        found |= {f"blk.{layer}.{name}.weight": size for name, size in sizes.items()}
    return found


def _random_rows(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Rows of blocks whose values are about as large as a product of ``columns`` wants them."""
    blocks = np.empty((rows * columns // _BLOCK, _BLOCK_BYTES), np.uint8)
    blocks[:, :2] = np.array([1 / (73 * columns**0.5)], np.float16).view(np.uint8)
    blocks[:, 2:] = rng.integers(-127, 128, (len(blocks), _BLOCK), np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A token a byte, then names that no text has."""
    alphabet = sorted(ByteLevel.alphabet())
    known = ["<|start|>", "<|end|>", *alphabet, "he"]
    if size < len(known):
        raise ConfigError(f"a vocabulary of {size}; allowed in GGUF: {len(known)} or more")
    tokens = [*known, *(f"<{number}>" for number in range(len(known), size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (size - 2))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
