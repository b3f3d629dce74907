"""A GGUF file of mixed types: every tensor's values are the format library's, in our order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.ggml_blocks import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCAB,
    assert_same_bits,
    library_values,
    write_llama,
)
from tests.models.conftest import to_gguf_name
from tilewright.compiler.formats import stored_format
from tilewright.compiler.formats.ggml_blocks import SIZES
from tilewright.errors import CheckpointError
from tilewright.models import ShapeName, find_model_or_shape, load_model, quantised_types
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.gguf.header import TENSOR_TYPES


def test_the_types_are_the_librarys() -> None:
    assert set(TENSOR_TYPES) == {*SIZES, "F32", "F16", "BF16"}
    for name, (number, block, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (kind.value, gguf.GGML_QUANT_SIZES[kind]) == (number, (block, block_bytes))
        assert SIZES.get(name, (block, block_bytes)) == (block, block_bytes)


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
    types = {name: dtype for name, (dtype, _, _) in TENSORS.items()}
    return write_llama(tmp_path / "mixed-Q4_K_M.gguf", types, embedding="Q6_K")


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


@pytest.mark.parametrize(
    ("block", "is_wide"),
    [(b"\x1a", True), (b"\x1b", False), (b"\xe4", True), (bytes(17), False)],
    ids=["below", "lowest", "above", "zeros"],
)
def test_mxfp4_outside_the_range_of_kernels_has_another_type(
    block: bytes, is_wide: bool, tmp_path: Path
) -> None:
    types = dict.fromkeys(TENSORS, "MXFP4")
    path = write_llama(tmp_path / "four.gguf", types, embedding="Q6_K")
    (found,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(int(found.data_offset) + 17 * 8 * 100)
        file.write(block)
    checkpoint = GGUFCheckpoint(path)
    label = checkpoint.stored_type("model.layers.0.mlp.up_proj.weight")
    assert label == ("MXFP4, wide exponents" if is_wide else "MXFP4")
    assert checkpoint.stored_type("model.layers.0.mlp.gate_proj.weight") == "MXFP4"
    assert stored_format(label) == (None if is_wide else "bf16")


def test_stored_types_are_told_by_the_header(mixed: Path) -> None:
    checkpoint = GGUFCheckpoint(mixed)
    for name, (dtype, _, _) in TENSORS.items():
        assert checkpoint.stored_type(f"model.layers.0.{name}.weight") == dtype
    assert checkpoint.stored_type("model.norm.weight") == "F32"
    with pytest.raises(CheckpointError, match="no tensor nowhere"):
        checkpoint.stored_type("nowhere")
    types = quantised_types(mixed)
    assert types[:2] == ("Q6_K", "Q5_1")  # most bytes first
    assert sorted(types) == ["Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"]
    shape = find_model_or_shape("shape:llama-3.2-1b")
    assert isinstance(shape, ShapeName) and quantised_types(shape) == ()
