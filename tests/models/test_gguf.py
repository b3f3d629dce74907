"""GGUF: exact values in Hugging Face's names and row order, and files that lie."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tilewright.errors import CheckpointError, TilewrightError
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.gguf.header import read_header
from tilewright.models.tokenizer.load import load_tokenizer

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MINIMAL = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.fixture
def tiny(tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]) -> Path:
    return write_gguf(tmp_path / "tiny-Q8_0.gguf", make_llama(), "Q8_0")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


@pytest.mark.parametrize("dtype", TYPES)
def test_every_tensor_equals_the_source_bit_for_bit(
    dtype: str, tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """q and k go through the converter's permutation and come back in Hugging Face's order.

    Rows are quantised one by one, so quantising the unpermuted tensor gives the same values.
    """
    model = make_llama(tie_word_embeddings=False, attention_bias=True)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model, dtype))
    weights = dict(model.named_parameters())
    assert set(checkpoint.names) == set(weights)
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType[dtype if weight.ndim == 2 else "F32"]
        stored = gguf.quants.quantize(weight.detach().numpy(), kind)
        expected = torch.from_numpy(gguf.quants.dequantize(stored, kind).reshape(weight.shape))
        got = checkpoint.get(name)
        meta = checkpoint.names[name]
        assert (meta.shape, meta.dtype, meta.nbytes) == (weight.shape, kind.name, stored.nbytes)
        assert got.dtype == STORED.get(kind.name, torch.float32)
        assert got.is_contiguous()
        assert torch.equal(got.float(), expected), name


@pytest.mark.parametrize("rows", [slice(0, 5), slice(7, 23), slice(-9, None), slice(4, 4)])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "o_proj"])
def test_rows_are_those_of_the_whole(tiny: Path, rows: slice, name: str) -> None:
    checkpoint = GGUFCheckpoint(tiny)
    full = f"model.layers.1.self_attn.{name}.weight"
    assert torch.equal(checkpoint.get(full, rows), checkpoint.get(full)[rows])


def test_rows_of_a_bias(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    model = make_llama(attention_bias=True, mlp_bias=True)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model))
    assert checkpoint.config.attention_bias and checkpoint.config.mlp_bias
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(
        checkpoint.get(name, slice(3, 11)), dict(model.named_parameters())[name][3:11]
    )


def test_configuration(tiny: Path) -> None:
    config = GGUFCheckpoint(tiny).config
    assert config.name == "tiny"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (262, 64, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.norm_eps == 1e-5
    assert not config.attention_bias


def test_tied_head_cannot_be_read(tiny: Path) -> None:
    checkpoint = GGUFCheckpoint(tiny)
    assert checkpoint.config.tie_embeddings
    with pytest.raises(CheckpointError, match="tied"):
        checkpoint.get("lm_head.weight")
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.get("nothing")


def test_untied_head(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    model = make_llama(tie_word_embeddings=False)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model))
    assert not checkpoint.config.tie_embeddings
    assert torch.equal(checkpoint.get("lm_head.weight"), model.lm_head.weight)


def test_rope_factors(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        make_llama(),
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config.rope.freq_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in checkpoint.names
    assert inverse_frequencies(checkpoint.config.rope, 16)[0] == 1.0


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.zeros(8, np.float32)])
def test_bad_rope_factors(
    factors: Any, tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        make_llama(),
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        GGUFCheckpoint(path)


def test_refused_type_is_named_with_the_allowed_ones(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    stored = np.zeros((2, 40), np.uint8)
    kind = gguf.GGMLQuantizationType.Q8_1
    path = write_gguf(
        tmp_path / "m.gguf",
        make_llama(),
        extra=lambda writer: writer.add_tensor("odd.weight", stored, raw_dtype=kind),
    )
    with pytest.raises(
        CheckpointError, match=r"'odd\.weight' has type Q8_1.*allowed: F32, F16.*, Q6_K"
    ):
        GGUFCheckpoint(path)


def test_unknown_tensor_is_reported(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    model = make_llama()
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        extra=lambda writer: writer.add_tensor("blk.0.odd.weight", np.ones(3, np.float32)),
    )
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"blk\.0\.odd\.weight of shape \[3\]"):
        check_tensors(GGUFCheckpoint(path), expected)


def test_content_hash_sees_weights_and_header(tiny: Path) -> None:
    first = GGUFCheckpoint(tiny).content_hash()
    assert first == GGUFCheckpoint(tiny).content_hash()
    assert len(first) == 64
    raw = bytearray(tiny.read_bytes())
    raw[-1] ^= 1
    tiny.write_bytes(raw)
    assert GGUFCheckpoint(tiny).content_hash() != first


def problem(path: Path) -> str:
    """Read all there is in a file; the message of what is wrong with it, or nothing."""
    try:
        checkpoint = GGUFCheckpoint(path)
        for name in checkpoint.names:
            checkpoint.get(name)
        checkpoint.content_hash()
        load_tokenizer(checkpoint.tokenizer_source).encode("hello <think> 1")
        check_tensors(checkpoint, dict.fromkeys(("model.norm.weight", "other"), (1,)))
    except TilewrightError as error:
        return str(error)
    return ""


def test_truncation_anywhere_is_an_error(tiny: Path, tmp_path: Path) -> None:
    raw = tiny.read_bytes()
    header = read_header(memoryview(raw), tiny).nbytes
    cut = tmp_path / "cut.gguf"
    # Every boundary of the short fields in front, then steps through vocabulary and data.
    lengths = [*range(1, 900), *range(900, header, 97), *range(header, len(raw), 4001)]
    for length in [*lengths, len(raw) - 1]:
        cut.write_bytes(raw[:length])
        with pytest.raises(CheckpointError) as caught:
            GGUFCheckpoint(cut)
        assert "\n" not in str(caught.value)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(CheckpointError, match="empty"):
        GGUFCheckpoint(empty)
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFCheckpoint(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GGML" + MINIMAL[4:], "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648.*allowed: 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 64) - 1), "number of metadata keys"),
    ],
)
def test_lying_headers(raw: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(memoryview(raw), Path("x.gguf"))


PAIR = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k")
TENSOR = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string("t")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (PAIR + struct.pack("<IQ", 8, 1 << 62) + b"abc", "needs 4611686018427387904 bytes, 3"),
        (PAIR + struct.pack("<IIQ", 9, 0, 1 << 40) + b"abc", "length of 'k'"),
        (PAIR + struct.pack("<IIQ", 9, 8, 1 << 40) + b"abc", "length of 'k'"),
        (PAIR + struct.pack("<IIQ", 9, 9, 1) + bytes(20), "element type 9"),
        (PAIR + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 9) + b"ab", "string 0 of 'k'"),
        (PAIR + struct.pack("<IQ", 8, 2) + b"\xff\xfe", "not UTF-8"),
        (PAIR + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 1) + b"\xff", "not UTF-8"),
        (PAIR + struct.pack("<I", 99), "type 99"),
        (TENSOR + struct.pack("<I", 5) + bytes(60), "5 axes"),
        (TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64), "an axis below 1"),
        (TENSOR + struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0) + bytes(64), "ends at byte"),
        (TENSOR + struct.pack("<IQIQ", 1, 4, 0, 3) + bytes(64), "not aligned"),
        (TENSOR + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(64), "multiple of 32"),
        (TENSOR + struct.pack("<IQIQ", 1, 4, 0, 1 << 63) + bytes(64), "ends at byte"),
        (TENSOR + struct.pack("<IQIQ", 1, 4, 777, 0) + bytes(64), "type 777"),
    ],
)
def test_lying_fields(raw: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(memoryview(raw), Path("x.gguf"))


def test_repeats_overlaps_and_alignment() -> None:
    row = struct.pack("<IQIQ", 1, 4, 0, 0)
    two = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    with pytest.raises(CheckpointError, match="'t' stands twice"):
        read_header(memoryview(two + (string("t") + row) * 2 + bytes(64)), Path("x"))
    with pytest.raises(CheckpointError, match="overlaps"):
        read_header(memoryview(two + string("t") + row + string("u") + row + bytes(64)), Path("x"))
    for value in (0, 3, 1 << 31):
        pair = string("general.alignment") + struct.pack("<II", 4, value)
        raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair
        with pytest.raises(CheckpointError, match="power of two"):
            read_header(memoryview(raw), Path("x"))


def test_a_lying_length_allocates_nothing(tmp_path: Path) -> None:
    raw = PAIR + struct.pack("<IIQ", 9, 8, 8000) + bytes(64_000)
    tracemalloc.start()
    try:
        for count in (8000, 1 << 40):
            lying = bytearray(raw)
            lying[len(PAIR) + 8 : len(PAIR) + 16] = struct.pack("<Q", count)
            try:
                read_header(memoryview(lying), tmp_path)
            except CheckpointError:
                continue
        assert tracemalloc.get_traced_memory()[1] < 8 * len(raw)
    finally:
        tracemalloc.stop()


@hypothesis.settings(
    max_examples=300,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_flipped_bytes_give_values_or_our_errors(data: st.DataObject, tiny: Path) -> None:
    raw = bytearray(tiny.read_bytes())
    header = read_header(memoryview(raw), tiny).nbytes
    near = st.integers(0, header - 1) if data.draw(st.booleans()) else st.integers(0, 1500)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(near)] = data.draw(st.integers(0, 255))
    flipped = tiny.with_name("flipped.gguf")
    flipped.write_bytes(raw)
    assert "\n" not in problem(flipped)


@pytest.mark.weights
def test_smollm2_equals_the_format_library(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert len(checkpoint.names) == len(stored) == 272

    def reference(name: str) -> torch.Tensor:
        values = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        return torch.from_numpy(values.copy())

    same = {
        "mlp.down_proj": "ffn_down",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
    }
    for ours, theirs in same.items():
        got = checkpoint.get(f"model.layers.29.{ours}.weight")
        assert torch.equal(got, reference(f"blk.29.{theirs}.weight"))
    rows = slice(1000, 1100)
    embedding = checkpoint.get("model.embed_tokens.weight", rows)
    assert torch.equal(embedding, reference("token_embd.weight")[rows])
    for ours, theirs, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        pairs = reference(f"blk.3.{theirs}.weight").reshape(heads, 32, 2, 576)
        got = checkpoint.get(f"model.layers.3.self_attn.{ours}.weight").reshape(heads, 2, 32, 576)
        assert torch.equal(got[:, 0], pairs[:, :, 0]) and torch.equal(got[:, 1], pairs[:, :, 1])


def test_a_quantised_tensor_of_one_axis(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Its blocks run along the rows, which have no bytes of their own."""
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.quantize(values, kind)
    for name in ("odd.weight", "blk.0.attn_q.bias"):
        path = write_gguf(
            tmp_path / "m.gguf",
            make_llama(),
            extra=lambda writer, name=name: writer.add_tensor(name, stored, raw_dtype=kind),
        )
        checkpoint = GGUFCheckpoint(path)
        found = next(name for name in checkpoint.names if "odd" in name or "q_proj.bias" in name)
        got = checkpoint.get(found)
        expected = torch.from_numpy(gguf.quants.dequantize(stored, kind))
        assert torch.equal(got.sort().values, expected.sort().values)
        assert torch.equal(checkpoint.get(found, slice(5, 40)), got[5:40])
