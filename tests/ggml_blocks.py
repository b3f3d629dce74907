"""Random ggml blocks, their values from the format library, and a model with these blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch

from tests.models.conftest import add_tokenizer, to_gguf_name
from tilewright.compiler.formats.ggml_blocks import SIZES
from tilewright.models import LoadedModel

# Offsets of float16 values in a block. All other bytes are random.
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
}


HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 256, 512, 4, 2, 262
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def random_blocks(dtype: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Return random bytes with scales between 2**-10 and 2**-5, with both signs.

    All values are finite.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, SIZES[dtype][1]), dtype=np.uint8)
    if dtype == "MXFP4":
        blocks[:, 0] = rng.integers(119, 124, num_blocks)
    if dtype == "IQ1_M":  # scale nibbles for sign and exponent
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x20
    for at in SCALES_AT[dtype]:
        sign = rng.choice([-1.0, 1.0], (num_blocks, 1))
        scales = sign * np.exp2(rng.uniform(-10, -5, (num_blocks, 1)))
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
    return blocks


def library_values(blocks: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])


def assert_same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Compare words. All NaN values are equal."""
    values = got.numpy().reshape(expected.shape)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    assert np.array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def write_llama(
    path: Path, types: Mapping[str, str], *more: Mapping[str, str], embedding: str
) -> Path:
    """Write a Llama with random matrices in a layer's types, by `SHAPES` names.

    ``more``: types of further layers.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1 + len(more))
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer)

    def add(name: str, dtype: str, num_rows: int, num_columns: int, seed: int) -> None:
        kind = gguf.GGMLQuantizationType[dtype]
        if dtype in SIZES:
            data = random_blocks(dtype, num_rows * num_columns // SIZES[dtype][0], seed)
        else:
            values = np.random.default_rng(seed).normal(0, 0.05, (num_rows, num_columns))
            data = gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(to_gguf_name(name), data.reshape(num_rows, -1), raw_dtype=kind)

    add("model.embed_tokens.weight", embedding, VOCAB, HIDDEN, seed=99)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer, own in enumerate((types, *more)):
        for seed, (name, shape) in enumerate(SHAPES.items(), start=len(SHAPES) * layer):
            add(f"model.layers.{layer}.{name}.weight", own[name], *shape, seed)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    """Return a file's tensors by name. Cached because the library reads vocabularies slowly."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def file_values(model: LoadedModel, names: Iterable[str]) -> torch.Tensor:
    """Return a Llama file's tensors in sequence, dequantized by the format's library. q and k have
    Hugging Face's row order.
    """
    (path,) = model.checkpoint.files
    tensors = _tensors(path)
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads}
    found = []
    for name in names:
        tensor = tensors[to_gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if (count := heads.get(name.split(".")[-2])) is not None:
            pairs = values.reshape(count, -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        found.append(torch.from_numpy(values))
    return torch.cat(found)
