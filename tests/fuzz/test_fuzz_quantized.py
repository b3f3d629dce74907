"""Folders with quantized weights that lie: tensors of other shapes and types, settings, bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz.limits import guarded
from tests.fuzz.mutations import Mutation, damaged_trees, mutations
from tests.models.quantized import test_float4, test_float8, test_integers, test_packages
from tests.models.quantized.folders import write
from tilewright.compiler.formats import STORED_NAMES, get_format, stored_format
from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint

CASES = {
    **{f"FP8 {n}": case for n, case in test_float8.CASES.items()},
    **test_integers.CASES,
    **test_float4.CASES,
    **test_packages.CASES,
}
FILE = "model.safetensors"
DTYPES = (torch.float32, torch.float16, torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound folder of each scheme."""
    root, found = tmp_path_factory.mktemp("quantized"), {}
    for name, (quantize, config, _) in CASES.items():
        found[name] = root / name.replace(" ", "_")
        write(found[name], quantize, config)
    return found


def read_all(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    for name in checkpoint.names:
        values = checkpoint.get(name)
        checkpoint.get(name, slice(1, 3))
        held = stored_format(checkpoint.stored_type(name))
        if held is not None and get_format(held).block > 1:
            kind, blocks = checkpoint.stored(name)
            assert STORED_NAMES[held] == kind
            unpacked = get_format(held).unpack(torch.from_numpy(blocks).flatten(), values.shape)
            assert torch.equal(unpacked.view(torch.int32), values.view(torch.int32))


def check(folder: Path) -> str:
    return guarded(lambda: read_all(folder), file_size=(folder / FILE).stat().st_size)


def copy(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_sound_folders_are_read(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        assert check(folder) == ""


@given(data=st.data(), case=st.sampled_from([*CASES]))
def test_tensors_of_other_shapes_and_types(
    data: st.DataObject, case: str, folders: dict[str, Path], scratch: Path
) -> None:
    folder = copy(folders[case], scratch)
    tensors = load_file(folder / FILE)
    names = sorted(name for name in tensors if ".layers.0." in name)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        own = tensors.pop(name)
        what = data.draw(st.sampled_from(("gone", "renamed", "cast", "shape", "bytes")))
        if what == "renamed":
            other = data.draw(st.sampled_from(names)).rpartition(".")[2]
            tensors[f"{name.rpartition('.')[0]}.{other}"] = own
        elif what == "cast":
            tensors[name] = own.float().to(data.draw(st.sampled_from(DTYPES)))
        elif what == "shape":
            shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
            tensors[name] = torch.zeros(shape, dtype=own.dtype)
        elif what == "bytes":
            byte = data.draw(st.integers(0, 255))
            raw = torch.full((own.nbytes,), byte, dtype=torch.uint8)
            tensors[name] = raw.view(own.dtype).reshape(own.shape)
    save_file({n: t.clone() for n, t in tensors.items()}, folder / FILE)
    check(folder)


@given(data=st.data(), case=st.sampled_from([*CASES]))
def test_settings_that_lie(
    data: st.DataObject, case: str, folders: dict[str, Path], scratch: Path
) -> None:
    folder = copy(folders[case], scratch)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    key = "quantization" if "quantization" in config else "quantization_config"
    config[key] = data.draw(damaged_trees(config[key]))
    (folder / "config.json").write_text(json.dumps(config))
    check(folder)


@given(mutation=mutations(max_steps=8), case=st.sampled_from([*CASES]))
def test_damage_anywhere(
    mutation: Mutation, case: str, folders: dict[str, Path], scratch: Path
) -> None:
    folder = copy(folders[case], scratch)
    (folder / FILE).write_bytes(mutation((folder / FILE).read_bytes()))
    check(folder)
