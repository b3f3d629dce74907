"""dllama's ``.m`` files read: exact values under Hugging Face's names, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.dllama_files import (
    MOE,
    SIZES,
    TYPES,
    header_bytes,
    header_pairs,
    model_bytes,
    random_weights,
    tensor_order,
    tokenizer_bytes,
    tokens,
)
from tilewright.errors import CheckpointError
from tilewright.models import find_model, load_model
from tilewright.models.checkpoints.dllama.checkpoint import DllamaCheckpoint
from tilewright.models.checkpoints.dllama.header import read_header, tensors, write_header
from tilewright.models.config import Llama3Scaling

SCALING = [(14, 8), (15, 1), (16, 4), (17, 8192), (18, 2)]


def write(path: Path, model_type: str = "llama", kind: str = "F32") -> Path:
    path.write_bytes(model_bytes(model_type, kind, random_weights(model_type)))
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write(tmp_path / "dllama_model_tiny_q40.m", kind="Q4_0")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_every_tensor_equals_the_source_bit_for_bit(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    checkpoint = DllamaCheckpoint(write(tmp_path / "m.m", model_type, kind))
    weights = random_weights(model_type)
    assert list(checkpoint.names) == list(weights)
    for name, _, typed in tensor_order(model_type):
        own = gguf.GGMLQuantizationType[kind if typed else "F32"]
        raw = gguf.quants.quantize(weights[name], own)
        values = gguf.quants.dequantize(raw, own).reshape(weights[name].shape)
        got = checkpoint.get(name)
        assert got.is_contiguous() and torch.equal(got.float(), torch.from_numpy(values)), name
        meta = checkpoint.names[name]
        assert (meta.shape, meta.dtype, meta.nbytes) == (got.shape, own.name, raw.nbytes)


@pytest.mark.parametrize("rows", [slice(0, 5), slice(7, 23), slice(-9, None), slice(4, 4)])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "o_proj"])
def test_rows_are_those_of_the_whole(tiny: Path, rows: slice, name: str) -> None:
    checkpoint = DllamaCheckpoint(tiny)
    full = f"model.layers.1.self_attn.{name}.weight"
    assert torch.equal(checkpoint.get(full, rows), checkpoint.get(full)[rows])


def test_half_split_rows_of_a_llama_stay_as_they_are(tmp_path: Path) -> None:
    weights, path = random_weights(), tmp_path / "m.m"
    data = model_bytes("llama", "F32", weights)
    own = header_pairs()
    path.write_bytes(header_bytes([*own, (18, 1)]) + data[len(header_bytes(own)) :])
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = DllamaCheckpoint(path).get(name)
    assert not torch.equal(moved, torch.from_numpy(weights[name]))
    assert torch.equal(moved.sort(dim=0)[0], torch.from_numpy(np.sort(weights[name], axis=0)))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_names_shapes_and_order(model_type: str, kind: str) -> None:
    extra = MOE if model_type == "qwen3_moe" else {}
    data = header_bytes(header_pairs(model_type, kind, **extra))
    header, nbytes = read_header(memoryview(data), Path("m.m"))
    assert nbytes == len(data)
    found = [(t.name, t.shape, t.dtype) for t in tensors(header)]
    assert found == [
        (name, shape, kind if typed else "F32")
        for name, shape, typed in tensor_order(model_type, **extra)
    ]
    moved = {t.name.split(".")[-2] for t in tensors(header) if t.num_heads}
    assert moved == ({"q_proj", "k_proj"} if model_type == "llama" else set())
    assert (header.norm_eps, header.rope_theta, header.scaling) == (1e-5, 10000, None)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_header_is_written_as_it_was_read(model_type: str, scaled: bool) -> None:
    pairs = header_pairs(model_type, "F32", **(MOE if model_type == "qwen3_moe" else {}))
    if scaled and model_type == "llama":
        pairs[-1:-1] = SCALING
    data = header_bytes(pairs)
    header, _ = read_header(memoryview(data), Path("m.m"))
    assert write_header(header, Path("m.m")) == data


def test_configuration(tiny: Path) -> None:
    config = DllamaCheckpoint(tiny).config
    assert (config.name, config.model_type) == ("tiny", "llama")
    assert {key: getattr(config, key) for key in SIZES} == SIZES
    assert (config.norm_eps, config.rope.theta, config.rope.scaling) == (1e-5, 10000.0, None)
    assert not (config.tie_embeddings or config.attention_bias or config.qk_norm)


def test_optional_keys() -> None:
    """A head is hidden / heads, theta 10,000 and epsilon 1e-5 unless the file says otherwise."""
    pairs = [pair for pair in header_pairs() if pair[0] not in (0, 7, 8, 11, 12, 19, 20)]
    header, _ = read_header(memoryview(header_bytes(pairs)), Path("m.m"))
    assert header == read_header(memoryview(header_bytes(header_pairs())), Path("m.m"))[0]
    data = header_bytes([*(p for p in header_pairs() if p[0] != 20), (20, 6), *SCALING])
    header, _ = read_header(memoryview(data), Path("m.m"))
    assert header.norm_eps == 1e-6 and header.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def changed(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return [pair for pair in header_pairs() if pair[0] not in dict(pairs)] + list(pairs)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (changed((22, 25)), r"header key 22 = 25 is unknown .*; allowed: 0 to 21"),
        (changed((-1, 0)), "header key -1 = 0 is unknown"),
        ([*header_pairs(), (2, 64)], r"hidden_size \(key 2\) occurs twice"),
        (changed((0, 1)), r"version \(key 0\) = 1 .*allowed: 0"),
        (
            changed((1, 0xABCD03)),
            r"arch \(key 1\) = 11259139 is not read; allowed: 11259136 \(llam",
        ),
        (changed((11, 0)), r"hidden_act \(key 11\) = 0 is not read; allowed: 1 \(silu\)"),
        (changed((13, 4)), r"weights \(key 13\) = 4 .*allowed: 0 \(F32\), 1 \(F16\), 2 \(Q4_0\)"),
        (changed((18, 3)), r"rope_type \(key 18\) = 3 .*allowed: 0 \(adjacent pairs\)"),
        (changed((20, 4)), r"norm_eps \(key 20\) = 4 .*allowed: 5 \(1e-5\), 6 \(1e-6\)"),
        (changed((2, -64)), r"hidden_size \(key 2\) = -64 .*allowed: 1 to"),
        (changed((4, 2**31 - 1)), r"num_layers \(key 4\) = 2147483647 .*allowed: 1 to 4096"),
        (changed((6, 3)), r"num_kv_heads \(key 6\) = 3 .*a divisor of the 4 heads"),
        (changed((19, 15)), r"head_dim \(key 19\) = 15 .*an even number"),
        (changed((7, 4)), r"num_experts \(key 7\) = 4 .*allowed: 0 to 0"),
        (changed((14, 8)), r"rope_low_freq_factor \(key 15\) is missing"),
        (changed((18, 1), (14, 8)), r"rope_factor \(key 14\) = 8 .*1 where rotation pairs"),
        (changed((13, 2), (3, 90)), r"down_proj.weight has rows of 90 in Q4_0; allowed: a mult"),
        ([p for p in header_pairs() if p[0] != 9], r"vocab_size \(key 9\) is missing; allowed: 1"),
        ([p for p in header_pairs() if p[0] != 13], r"weights \(key 13\) is missing"),
    ],
)
def test_headers_that_are_refused(pairs: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(memoryview(header_bytes(pairs)), Path("m.m"))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("m.m: ")


@pytest.mark.parametrize("nbytes", [0, 7, 12, 10**6, 2**32 - 1])
def test_header_sizes_that_lie(nbytes: int) -> None:
    data = bytearray(header_bytes(header_pairs()))
    data[4:8] = struct.pack("<I", nbytes)
    with pytest.raises(CheckpointError, match=f"the header says it has {nbytes} bytes"):
        read_header(memoryview(bytes(data)), Path("m.m"))


@pytest.mark.parametrize("data", [b"", b"GGUF", struct.pack("<ii", 0xABCD00, 8) + bytes(64)])
def test_other_files(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a dllama model"):
        read_header(memoryview(data), Path("m.m"))


def test_a_file_ends_exactly_after_its_last_tensor(tiny: Path) -> None:
    data = tiny.read_bytes()
    tiny.write_bytes(data + b"12")
    with pytest.raises(
        CheckpointError, match=r"2 bytes follow .* lm_head.weight of shape \[262, 6"
    ):
        DllamaCheckpoint(tiny)
    tiny.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"lm_head.weight of shape \[262, 64\] \(Q4_0\) ends"):
        DllamaCheckpoint(tiny)
    tiny.write_bytes(data[: 3 * len(data) // 4])
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.\d\..* of shape .*cut short"):
        DllamaCheckpoint(tiny)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_their_tensor(
    kind: str, value: float, tmp_path: Path
) -> None:
    weights, name = random_weights(), "model.layers.1.mlp.down_proj.weight"
    weights[name][5, 7] = value
    with np.errstate(all="ignore"):
        (tmp_path / "m.m").write_bytes(model_bytes("llama", kind, weights))
    checkpoint = DllamaCheckpoint(tmp_path / "m.m")
    with pytest.raises(CheckpointError, match=f"tensor {name} has values that are inf or NaN"):
        checkpoint.get(name)
    checkpoint.get(name, slice(6, None))


def test_unknown_tensors(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor nothing; allowed: lm_head\.weight, "):
        DllamaCheckpoint(tiny).get("nothing")


def test_content_hash_sees_weights_and_header(tiny: Path) -> None:
    first = DllamaCheckpoint(tiny).content_hash()
    assert first == DllamaCheckpoint(tiny).content_hash()
    data = tiny.read_bytes()
    tiny.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert DllamaCheckpoint(tiny).content_hash() != first


def test_the_tokenizer_beside_a_model(tiny: Path) -> None:
    checkpoint = DllamaCheckpoint(tiny)
    with pytest.raises(CheckpointError, match=r"0 tokenizers beside it; allowed: .*_q40\.t, or ex"):
        load_model(tiny)
    other = tiny.with_name("other.t")
    other.write_bytes(tokenizer_bytes(tokens(special_first=True)))
    assert checkpoint.tokenizer_source.path == other
    tiny.with_name("third.t").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 tokenizers beside it"):
        load_model(tiny)
    own = tiny.with_suffix(".t")
    other.rename(own)
    assert checkpoint.tokenizer_source.path == own
    model = load_model(tiny)
    assert model.tokenizer.encode("hell<|im_end|>") == [261, 1]
    assert model.tokenizer.eos_ids == (1,)


def test_a_folder_with_one_model_is_found(tiny: Path) -> None:
    assert find_model(tiny.parent) == find_model(str(tiny)) == tiny
    tiny.with_name("another.m").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no config.json and 0 .gguf files, 2 .m files"):
        find_model(tiny.parent)
