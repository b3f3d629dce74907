"""Block weights on the CPU are the format's values, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cpu.onnxruntime import weights
from tilewright.compiler.targets.cpu.onnxruntime.codes import block_codes, signed_codes
from tilewright.compiler.targets.cpu.onnxruntime.weights import BlockWeight, WeightFile

BITS = {"bfp8": 8, "bfp4": 4, "q80": 8, "q40": 4}
BLOCK = {"bfp8": 16, "bfp4": 16, "q80": 32, "q40": 32}
POWERS_OF_TWO = ("bfp8", "bfp4")


def awkward(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, with zeros, whole blocks of zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_columns)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-20, 16, shape, generator=generator).float())
    values[torch.rand(shape, generator=generator) < 0.1] = 0.0
    values[0, :32] = 0.0
    values[-1, -1] = 1e-40
    return values


def decode(name: str, codes: np.ndarray, scales: np.ndarray, num_columns: int) -> np.ndarray:
    """MatMulNBits' layout read back by this test: ``(code - zero) * scale``."""
    num_rows, num_blocks, width = codes.shape
    block = BLOCK[name]
    bits = 8 * width // block
    flat = codes.reshape(num_rows, num_blocks * width)
    if bits == 4:
        flat = np.stack((flat & 15, flat >> 4), axis=-1).reshape(num_rows, -1)
    signed = flat.astype(np.float32).reshape(num_rows, num_blocks, block) - (1 << (bits - 1))
    values = signed * scales.reshape(num_rows, num_blocks, 1)
    return values.reshape(num_rows, -1)[:, :num_columns]


@given(st.sampled_from(sorted(BITS)), st.integers(1, 9), st.integers(1, 80), st.integers(0, 999))
def test_codes_and_scales_are_the_formats_values(
    name: str, num_rows: int, num_columns: int, seed: int
) -> None:
    dense = awkward(num_rows, num_columns, seed)
    codes, scales = block_codes(signed_codes(dense, name), name)
    num_blocks = -(-num_columns // BLOCK[name])
    assert codes.shape == (num_rows, num_blocks, BLOCK[name] * BITS[name] // 8)
    assert codes.dtype == np.uint8
    assert scales.shape == (num_rows * num_blocks,)
    expected = get_format(name).round_trip(dense).numpy()
    assert np.array_equal(decode(name, codes, scales, num_columns), expected)
    if name in POWERS_OF_TWO:
        mantissas, _ = np.frexp(scales[scales > 0])
        assert (mantissas == 0.5).all()


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("num_columns", [32, 16, 40])
@pytest.mark.parametrize("name", sorted(BITS))
def test_onnx_runtime_dequantises_to_the_formats_values(
    name: str, num_columns: int, level: int
) -> None:
    """Through an identity product at a float accuracy level."""
    dense = torch.randn(24, num_columns) * torch.exp2(torch.randint(-9, 9, (24, 1)).float())
    codes, scales = block_codes(signed_codes(dense, name), name)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=num_columns,
        N=24,
        bits=BITS[name],
        block_size=BLOCK[name],
        accuracy_level=level,
    )
    graph = helper.make_graph(
        [node],
        "identity",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, num_columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 24])],
        [
            onnx.numpy_helper.from_array(codes, "codes"),
            onnx.numpy_helper.from_array(scales, "scales"),
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=imports)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": np.eye(num_columns, dtype=np.float32)})
    assert np.array_equal(got.T, get_format(name).round_trip(dense).numpy())


DENSE = awkward(6, 40)


@pytest.fixture
def weight_file(tmp_path: Path) -> WeightFile:
    return WeightFile(tmp_path / "weights.bin", {"w": DENSE}.__getitem__)


def stored(weight_file: WeightFile, name: str) -> np.ndarray:
    """An initializer read back through onnx's own reader of external data."""
    weight_file._file.flush()
    (tensor,) = (t for t in weight_file.initializers if t.name == name)
    copied = TensorProto()
    copied.CopyFrom(tensor)
    onnx.external_data_helper.load_external_data_for_tensor(copied, str(weight_file.path.parent))
    array: np.ndarray = onnx.numpy_helper.to_array(copied)
    return array


def recipe(name: str, axis: str = "in", rows: tuple[int, int] | None = None) -> WeightRecipe:
    count = 6 if rows is None else rows[1] - rows[0]
    return WeightRecipe((Segment("w", count, rows=rows),), (count, 40), name, axis)


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "bfp8", "bfp4", "q80", "q40"])
def test_dense_weights_are_the_formats_values(
    weight_file: WeightFile, name: str, axis: str
) -> None:
    expected = get_format(name).round_trip(DENSE, axis=0 if axis == "out" else 1).numpy()
    wanted = recipe(name, axis)
    assert np.array_equal(stored(weight_file, weight_file.dense(wanted)), expected)
    turned = stored(weight_file, weight_file.dense(wanted, transposed=True))
    assert np.array_equal(turned, expected.T)


def test_bf16_tables_are_two_bytes_each(weight_file: WeightFile) -> None:
    name = weight_file.bfloat16(recipe("bf16"))
    assert weight_file.num_bytes == 2 * DENSE.numel()
    got = stored(weight_file, name).astype(np.float32)
    assert np.array_equal(got, DENSE.bfloat16().float().numpy())


def test_blocks_are_written_with_their_scales(weight_file: WeightFile) -> None:
    weight = weight_file.blocks(recipe("bfp8"))
    assert weight == BlockWeight(weight.codes, weight.scales, 8, 16, 6, 40)
    values = decode(
        "bfp8", stored(weight_file, weight.codes), stored(weight_file, weight.scales), 40
    )
    assert np.array_equal(values, get_format("bfp8").round_trip(DENSE).numpy())
    assert weight_file.num_bytes == 6 * 48 + 4 * 6 * 3


def test_equal_recipes_are_written_once_and_unequal_ones_apart(weight_file: WeightFile) -> None:
    first = weight_file.dense(recipe("fp32"))
    size = weight_file.num_bytes
    assert weight_file.dense(recipe("fp32")) == first
    assert weight_file.num_bytes == size
    others = [
        weight_file.dense(recipe("fp32", rows=(0, 2))),
        weight_file.dense(recipe("fp32", rows=(2, 6))),
        weight_file.dense(recipe("bfp8")),
        weight_file.dense(recipe("bfp8", "out")),
    ]
    assert len({first, *others}) == 5
    assert np.array_equal(stored(weight_file, others[0]), DENSE[:2].numpy())
    assert np.array_equal(stored(weight_file, others[1]), DENSE[2:].numpy())


def test_tensors_start_on_pages(weight_file: WeightFile) -> None:
    for name in ("fp32", "bf16", "bfp8"):
        weight_file.dense(recipe(name))
    offsets = [
        int(entry.value)
        for tensor in weight_file.initializers
        for entry in tensor.external_data
        if entry.key == "offset"
    ]
    assert len(offsets) == 3
    assert all(offset % 4096 == 0 for offset in offsets)


class ByRows:
    """Tensors that are given by rows, too; ``longest`` is the most rows asked for at once."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors, self.longest = tensors, 0

    def __call__(self, name: str) -> torch.Tensor:
        self.longest = max(self.longest, len(self.tensors[name]))
        return self.tensors[name]

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        self.longest = max(self.longest, last - first)
        return self.tensors[name][first:last].clone()


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "bfp8", "bfp4", "q80", "q40"])
def test_tables_written_by_rows_are_the_same(
    name: str, axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tensors one below the other, 32 rows at a time, the last few fewer."""
    source = ByRows(w=awkward(60, 40), v=awkward(41, 40))
    wanted = WeightRecipe((Segment("w", 60), Segment("v", 30, (3, 33))), (90, 40), name, axis)
    found = []
    for chunk in (1 << 20, 32 * 40):
        monkeypatch.setattr(weights, "_CHUNK_VALUES", chunk)
        source.longest = 0
        file = WeightFile(tmp_path / f"{chunk}.bin", source)
        names = [file.dense(wanted), file.dense(wanted, transposed=True), file.bfloat16(wanted)]
        if name in BITS and axis == "in":
            blocks = file.blocks(wanted)
            names += [blocks.codes, blocks.scales]
        file.close()
        found.append((names, file.num_bytes, (tmp_path / f"{chunk}.bin").read_bytes()))
    assert found[0] == found[1] and source.longest == 32
