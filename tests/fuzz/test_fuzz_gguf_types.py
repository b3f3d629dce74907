"""Mutated GGUF files of every tensor type, in one file and in parts: values or an error in a line.

Blocks of `stored` have the values of `get`.
"""

from __future__ import annotations

import random
import struct
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.fuzz.campaign import run_many
from tests.fuzz.mutations import LYING_NUMBERS
from tilewright.compiler.formats import STORED_NAMES, get_format, stored_format
from tilewright.errors import TilewrightError
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.gguf.header import TENSOR_TYPES

HIDDEN, ROWS = 256, 4
TENSORS = (
    *(f"blk.0.{name}" for name in ("attn_q", "attn_k", "ffn_up", "attn_norm")),
    *("token_embd", "output_norm"),
)
CASES = (*sorted(TENSOR_TYPES), "parts")
_PARTS = 3


def write(path: Path, name: str, *, norms: str = "F32") -> None:
    """Write a model's header with small tensors of a type, with random bytes."""
    is_split = name == "parts"
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=2 if is_split else 0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(ROWS)
    kind = gguf.GGMLQuantizationType["Q4_K" if is_split else name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(name))
    for tensor in TENSORS:
        if tensor.endswith("_norm"):
            vector = np.ones(HIDDEN, np.float32)
            own = gguf.GGMLQuantizationType[norms]
            writer.add_tensor(f"{tensor}.weight", gguf.quants.quantize(vector, own), raw_dtype=own)
            continue
        data = rng.integers(0, 256, (ROWS, HIDDEN // block * block_bytes), np.uint8)
        writer.add_tensor(f"{tensor}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def files(folder: Path, name: str) -> dict[str, bytes]:
    """Return the bytes of a valid model's files by name."""
    (folder / name).mkdir(exist_ok=True)
    write(folder / name / "m.gguf", name)
    return {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """Change bytes, mostly of the header."""
    for _ in range(rng.randrange(1, 4)):
        size = len(raw) if rng.random() < 0.2 else min(len(raw), 1400)
        at, choice = rng.randrange(size + 1), rng.randrange(7)
        if choice == 0:
            raw = raw[:at]
        elif choice == 1:
            raw = raw[:at] + raw[at + rng.randrange(1, 17) :]
        elif choice == 2:
            raw = raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
        elif choice == 3:
            number = struct.pack("<Q", rng.choice(LYING_NUMBERS))[: rng.choice((4, 8))]
            raw = raw[:at] + number + raw[at + len(number) :]
        else:
            raw = raw[:at] + bytes((rng.randrange(256),)) + raw[at + 1 :]
    return raw


def run(folder: Path, name: str, seed: int) -> bool:
    """Read a mutated model whole. Return whether it was refused."""
    rng = random.Random(f"{name} {seed}")
    own = files(folder, name)
    path = folder / name / rng.choice([*own])
    path.write_bytes(mutate(own[path.name], rng))
    text = ""
    try:
        read_whole(path)
    except TilewrightError as error:
        text = str(error)
    finally:
        path.write_bytes(own[path.name])
    assert "\n" not in text and len(text) < 1500
    return bool(text)


def read_whole(path: Path) -> None:
    checkpoint = GGUFCheckpoint(path)
    for name, meta in checkpoint.names.items():
        values = checkpoint.get(name)
        assert values.shape == meta.shape
        held = stored_format(checkpoint.stored_type(name))
        if held is None or get_format(held).block == 1 or len(meta.shape) < 2:
            continue
        kind, data = checkpoint.stored(name)
        assert kind == STORED_NAMES[held]
        unpacked = get_format(held).unpack(torch.from_numpy(data).flatten(), meta.shape)
        is_number = ~values.isnan()
        assert torch.equal(unpacked.isnan(), ~is_number)
        assert torch.equal(
            unpacked[is_number].view(torch.int32), values[is_number].view(torch.int32)
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf_types")


@pytest.mark.parametrize("name", CASES)
def test_mutated_files_are_read_or_refused_in_a_line(name: str, folder: Path) -> None:
    for file in files(folder, name):
        read_whole(folder / name / file)
    assert len(files(folder, name)) == (_PARTS if name == "parts" else 1)
    refused = sum(run(folder, name, seed) for seed in range(30))
    assert 5 <= refused < 30


@pytest.mark.parametrize("norms", ["MXFP4", "Q8_0", "Q4_0"])
def test_a_vector_in_blocks_is_read_whole(norms: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "F16", norms=norms)
    read_whole(tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.stored_type("model.norm.weight") == norms
    whole = checkpoint.get("model.norm.weight")
    assert (whole - 1).abs().max() < 1e-3
    assert torch.equal(checkpoint.get("model.norm.weight", slice(3, 9)), whole[3:9])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_mutated_files_are_read_or_refused_in_a_line(name: str, folder: Path) -> None:
    run_many(lambda seed: run(folder, name, seed), f"GGUF {name}", len(CASES))
