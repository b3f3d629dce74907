"""Every block layout equals the format library's values, alone and in a file of mixed types."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.conftest import add_tokenizer, to_gguf_name
from tilewright.models import load_model
from tilewright.models.checkpoints import gguf_blocks
from tilewright.models.checkpoints.gguf import GGUFCheckpoint
from tilewright.models.checkpoints.gguf_blocks import DECODERS, dequantise
from tilewright.models.checkpoints.gguf_header import TENSOR_TYPES

# Where a block has its float16 numbers; every other byte of a block may be anything.
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(dtype: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes, with scales of both signs from 2**-10 to 2**-5, so that all values are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, TENSOR_TYPES[dtype][2]), dtype=np.uint8)
    for at in SCALES_AT[dtype]:
        sign = rng.choice([-1.0, 1.0], (num_blocks, 1))
        scales = sign * np.exp2(rng.uniform(-10, -5, (num_blocks, 1)))
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
    return blocks


def library_values(blocks: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])


def assert_same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal words, the sign of zero included, but for what kind of NaN a NaN is."""
    values = got.numpy().reshape(expected.shape)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    assert np.array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def test_the_tables_agree_with_the_library() -> None:
    assert set(DECODERS) == set(SCALES_AT) == set(TENSOR_TYPES) - {"F32", "F16", "BF16"}
    for name, (number, block, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (kind.value, gguf.GGML_QUANT_SIZES[kind]) == (number, (block, block_bytes))


@pytest.mark.parametrize("dtype", DECODERS)
@pytest.mark.parametrize("num_blocks", [0, 1, 700])
def test_finite_blocks(dtype: str, num_blocks: int) -> None:
    blocks = random_blocks(dtype, num_blocks)
    got = dequantise(blocks, dtype)
    assert got.dtype == torch.float32
    assert got.shape == (num_blocks * TENSOR_TYPES[dtype][1],)
    if num_blocks:
        assert got.isfinite().all()
        assert got.unique().numel() > 10
        assert_same_bits(got, library_values(blocks, dtype))


@pytest.mark.parametrize("dtype", DECODERS)
@given(data=st.data())
def test_any_bytes(dtype: str, data: st.DataObject) -> None:
    """Scales that are inf, NaN or denormal included."""
    size = TENSOR_TYPES[dtype][2]
    raw = data.draw(st.binary(min_size=size, max_size=size))
    block = np.frombuffer(raw, np.uint8)[None]
    assert_same_bits(dequantise(block, dtype), library_values(block, dtype))


@pytest.mark.parametrize("dtype", DECODERS)
def test_pieces_are_the_whole(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(dtype, 23)
    whole = dequantise(blocks, dtype)
    monkeypatch.setattr(gguf_blocks, "CHUNK_VALUES", 1024)
    assert torch.equal(dequantise(blocks, dtype), whole)


@pytest.mark.parametrize("dtype", DECODERS)
def test_memory_is_the_values_and_little_more(dtype: str) -> None:
    blocks = random_blocks(dtype, (1 << 22) // TENSOR_TYPES[dtype][1])
    tracemalloc.start()
    try:
        num_bytes = dequantise(blocks, dtype).nbytes
        assert tracemalloc.get_traced_memory()[1] < 1.25 * num_bytes
    finally:
        tracemalloc.stop()


def test_the_second_half_of_the_scales_of_q4_k() -> None:
    """Groups 4 to 7 take their top bits from the bytes of groups 0 to 3: one by hand."""
    block = np.zeros((1, 144), np.uint8)
    block[0, :4] = np.array([1.0, 0.5], "<f2").view(np.uint8)
    block[0, 4 + 1] = 0b10_000011  # group 1: scale 3; group 5: scale 0b10....
    block[0, 8 + 1] = 0b01_000010  # group 1: minimum 2; group 5: minimum 0b01....
    block[0, 12 + 1] = 0b1100_0101  # group 5: scale 0b..0101, minimum 0b..1100
    block[0, 16 + 32 : 16 + 64] = 0x07  # group 2: 7 everywhere, group 3: 0
    block[0, 16 : 16 + 32] = 0x20  # group 0: 0, group 1: 2
    block[0, 16 + 64 : 16 + 96] = 0x10  # group 4: 0, group 5: 1
    groups = dequantise(block, "Q4_K").view(8, 32)
    assert groups[:, 0].tolist() == [0, 2 * 3 - 1, 0, 0, 0, 37 - 28 / 2, 0, 0]
    assert torch.equal(groups, groups[:, :1].expand(8, 32))


HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 256, 512, 4, 2, 262
TENSORS = {
    "self_attn.q_proj": ("Q4_K", HIDDEN, HIDDEN),
    "self_attn.k_proj": ("Q5_K", HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": ("Q6_K", HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": ("Q5_0", HIDDEN, HIDDEN),
    "mlp.gate_proj": ("Q5_1", INNER, HIDDEN),
    "mlp.up_proj": ("Q4_1", INNER, HIDDEN),
    "mlp.down_proj": ("Q6_K", HIDDEN, INNER),
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One layer with a type of its own for every projection, of random blocks."""
    path = tmp_path / "mixed-Q4_K_M.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer)

    def add(name: str, dtype: str, num_rows: int, num_columns: int, seed: int) -> None:
        blocks = random_blocks(dtype, num_rows * num_columns // TENSOR_TYPES[dtype][1], seed)
        kind = gguf.GGMLQuantizationType[dtype]
        writer.add_tensor(to_gguf_name(name), blocks.reshape(num_rows, -1), raw_dtype=kind)

    add("model.embed_tokens.weight", "Q6_K", VOCAB, HIDDEN, seed=99)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for seed, (name, (dtype, num_rows, num_columns)) in enumerate(TENSORS.items()):
        add(f"model.layers.0.{name}.weight", dtype, num_rows, num_columns, seed)
    for norm in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_hugging_face_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotation pairs of a head apart again: the even rows, then the odd ones."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


@pytest.mark.parametrize("name", TENSORS)
def test_a_file_of_mixed_types(name: str, mixed: Path) -> None:
    """Against the library's own reader, rows by rows too, with q and k in Hugging Face's order."""
    checkpoint = GGUFCheckpoint(mixed)
    full = f"model.layers.0.{name}.weight"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(mixed).tensors}[to_gguf_name(full)]
    dtype, num_rows, num_columns = TENSORS[name]
    expected = library_values(stored.data, dtype)
    if name.endswith(("q_proj", "k_proj")):
        expected = in_hugging_face_order(expected, HEADS if "q_proj" in name else KV_HEADS)
    meta = checkpoint.names[full]
    assert (meta.dtype, meta.shape) == (dtype, (num_rows, num_columns))
    assert meta.nbytes == stored.n_bytes
    assert_same_bits(checkpoint.get(full), expected)
    for rows in (slice(0, 3), slice(17, 90), slice(-5, None)):
        assert_same_bits(checkpoint.get(full, rows), expected[rows])


def test_a_file_of_mixed_types_is_a_model(mixed: Path) -> None:
    loaded = load_model(mixed)
    assert loaded.config.name == "mixed"
    assert (loaded.config.vocab_size, loaded.config.num_heads) == (VOCAB, HEADS)
    names = {name for name, _ in loaded.module.named_parameters()}
    assert names == set(loaded.checkpoint.names)
    assert all(loaded.checkpoint.get(name).isfinite().all() for name in names)
