"""Hugging Face folders that lie: headers, shapes, offsets, the index of shards, config.json."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.fuzz.limits import guarded, guarded_apart
from tests.fuzz.mutations import LYING_NUMBERS, ODD_VALUES, Mutation, damaged_trees, mutations
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint
from tilewright.models.checkpoints.huggingface.shards import INDEX, SINGLE

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TENSORS = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,), "scalar": ()}


def header_of(raw: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    return header


def with_header(raw: bytes, header: object) -> bytes:
    """The file with this header in the place of its own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + struct.unpack("<Q", raw[:8])[0] :]


@pytest.fixture(scope="module")
def folder(scratch: Path) -> Path:
    (scratch / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.ones(shape) for name, shape in TENSORS.items()}, scratch / SINGLE)
    (scratch / "first.bin").write_bytes((scratch / SINGLE).read_bytes())
    return scratch


@pytest.fixture(scope="module")
def sound(folder: Path) -> bytes:
    return (folder / "first.bin").read_bytes()


SHARDS = {name: f"{number}.safetensors" for number, name in enumerate(TENSORS)}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and their index."""
    path = tmp_path_factory.mktemp("sharded")
    (path / "config.json").write_text(json.dumps(CONFIG))
    for number, (name, shape) in enumerate(TENSORS.items()):
        save_file({name: torch.ones(shape)}, path / f"{number}.safetensors")
    write_index(path, SHARDS)
    return path


def write_index(path: Path, weight_map: object) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_all(path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(path)
    for name in checkpoint.names:
        checkpoint.get(name)
        checkpoint.get(name, slice(1, 3))
    checkpoint.content_hash()
    check_tensors(checkpoint, TENSORS)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_the_sound_folders_are_read(sound: bytes, folder: Path, sharded: Path) -> None:
    (folder / SINGLE).write_bytes(sound)  # in whatever order tests run: others damage both
    write_index(sharded, SHARDS)
    for path in (folder, sharded):
        assert guarded(lambda path=path: read_all(path), file_size=size_of(path)) == ""
        assert guarded_apart(lambda path=path: read_all(path), file_size=size_of(path)) == ""


@given(mutation=mutations(head=400))
def test_damage_near_the_front(mutation: Mutation, sound: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(mutation(sound))
    guarded(lambda: read_all(folder), file_size=size_of(folder))


@given(data=st.data())
@example(data=None)
def test_headers_that_lie(data: st.DataObject | None, sound: bytes, folder: Path) -> None:
    header = header_of(sound)
    numbers = (*LYING_NUMBERS, *ODD_VALUES, [0, 2**63], [2**63, 0], [2**32, 2**32], [8, 4])
    if data is None:  # no bytes, of a shape that none can have
        header["scalar"] = {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}
    else:
        header = data.draw(damaged_trees(header, numbers))
    (folder / SINGLE).write_bytes(with_header(sound, header))
    guarded_apart(lambda: read_all(folder), file_size=size_of(folder))


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}' * 2,
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 100_000 + b'], "data_offsets": [0, 4]}}',
        b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
        b"",
    ],
    ids=("lists", "maps", "two", "a name twice", "digits", "surrogate", "not UTF-8", "nothing"),
)
def test_headers_of_odd_forms(header: bytes, sound: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(with_header(sound, header))
    assert guarded_apart(lambda: read_all(folder), file_size=size_of(folder))


@pytest.mark.parametrize("length", LYING_NUMBERS)
def test_the_header_length_lies(length: int, sound: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", length) + sound[8:])
    assert guarded_apart(lambda: read_all(folder), file_size=size_of(folder))


@given(config=damaged_trees(CONFIG))
def test_configurations_that_lie(config: Any, sound: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(sound)
    (folder / "config.json").write_text(json.dumps(config))
    guarded(lambda: read_all(folder), file_size=size_of(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\0", b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 100_000),
        *(b'{"vocab_size": ' + b"9" * 100_000 + b"}", b'{"vocab_size": 1e999}', b"NaN"),
        *(json.dumps({"model_type": "x" * 100_000}).encode(), "{}".encode("utf-16")),
    ],
    ids=lambda text: f"{text[:12]!r}"[2:-1],
)
def test_a_config_that_is_none(text: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    assert guarded(lambda: read_all(folder), file_size=size_of(folder))
    (folder / "config.json").write_text(json.dumps(CONFIG))


odd_shards = st.sampled_from(
    (INDEX, "config.json", "0.safetensors", "", ".", "..", "../x", "a\0", "\ud800", "a\nb", "é", 1)
)


@given(
    weight_map=st.dictionaries(
        st.sampled_from((*TENSORS, "\ud800", "a\nb", "")), odd_shards, max_size=4
    )
    | st.sampled_from(ODD_VALUES)
)
@example(weight_map={"model.norm.weight": INDEX})
@example(weight_map={"model.norm.weight": "\ud800"})
def test_an_index_that_lies(weight_map: object, sharded: Path) -> None:
    write_index(sharded, weight_map)
    guarded_apart(lambda: read_all(sharded), file_size=size_of(sharded))
