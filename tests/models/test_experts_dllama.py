"""Qwen3's mixtures of experts as dllama's ``.m`` files: read, written, from every container."""

from __future__ import annotations

import dataclasses
import io
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests import gguf_models
from tests.architecture_checks import their_logits
from tests.dllama_files import (
    MOE,
    header_bytes,
    header_pairs,
    model_bytes,
    random_weights,
    tokenizer_bytes,
    tokens,
)
from tests.models.test_experts_folder import rewritten, saved, together
from tests.models.test_experts_gguf import make
from tests.tiny import prefill, random_tokens
from tilewright.compiler.driver import compile_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.checkpoints.base import Checkpoint, check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.dllama.checkpoint import DllamaCheckpoint
from tilewright.models.checkpoints.dllama.writer import write_model
from tilewright.models.config import MoeConfig
from tilewright.models.sources import stored_shapes

Q40 = get_format("q40")
SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def model_of(**changes: Any) -> SimpleNamespace:
    """What the bytes of `tests.dllama_files` describe, with its weights."""
    sizes: dict[str, Any] = {
        **{**SIZES, "intermediate_size": 96, "vocab_size": 262, "max_positions": 512},
        **{"num_experts": 3, "experts_per_token": 2, "expert_size": 32, "tie_embeddings": False},
    }
    model = make("qwen3_moe", **{**sizes, **changes})
    weights = random_weights("qwen3_moe", **MOE)
    if not changes:
        model.checkpoint.tensors = {
            n: torch.from_numpy(weights[n]) * 0.2 for n in model.checkpoint.tensors
        }
    return model


def bytes_of(model: SimpleNamespace, kind: str) -> bytes:
    weights = {name: tensor.numpy() for name, tensor in model.checkpoint.tensors.items()}
    return model_bytes("qwen3_moe", kind, weights, **MOE)


def written(checkpoint: Checkpoint, weights: str = "F32") -> bytes:
    file = io.BytesIO()
    write_model(checkpoint, file, weights=weights, pack_q40=Q40.pack, progress=lambda *_: None)
    return file.getvalue()


def test_what_a_file_says_is_read(tmp_path: Path) -> None:
    model = model_of()
    (tmp_path / "m.m").write_bytes(bytes_of(model, "F32"))
    found = open_checkpoint(tmp_path / "m.m")
    expected = dataclasses.replace(model.config, name="m")
    assert isinstance(found.config, MoeConfig) and found.config == expected
    assert found.config.renormalise and not found.config.shared_size
    check_tensors(found, stored_shapes(model.module))
    for name, tensor in model.checkpoint.tensors.items():
        assert torch.equal(found.get(name), tensor), name


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("source", ["apart", "together", "gguf", "dllama"])
def test_every_container_gives_the_same_bytes(source: str, kind: str, tmp_path: Path) -> None:
    model = model_of()
    expected = bytes_of(model, kind)
    if source == "dllama":
        path = tmp_path / "m.m"
        path.write_bytes(expected)
    elif source == "gguf":
        path = gguf_models.write(model, tmp_path / "m.gguf")
    else:
        path = saved(model, tmp_path)
        if source == "together":
            rewritten(path, together)
    found = written(open_checkpoint(path), kind)
    pairs = header_pairs("qwen3_moe", kind, **MOE)
    assert found[: 8 + 8 * len(pairs)] == header_bytes(pairs)
    assert found == expected


def test_blocks_that_no_quantiser_makes_are_kept(tmp_path: Path) -> None:
    """Out of a GGUF file, an expert's out of the stacked tensor that holds it."""
    model = model_of()
    blocks = gguf.quants.quantize(
        gguf_models.converted(model)["model.layers.1.mlp.experts.up_proj.weight"].numpy(),
        gguf.GGMLQuantizationType.Q4_0,
    )
    blocks[2, 7, -18:] = np.frombuffer(np.float16(0.5).tobytes() + bytes([0x99] * 16), np.uint8)
    path = gguf_models.write(model, tmp_path / "m.gguf", kind="Q4_0")
    data = bytearray(path.read_bytes())
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up_exps.weight"]
    data[tensor.data_offset : tensor.data_offset + blocks.nbytes] = blocks.tobytes()
    path.write_bytes(data)
    source = open_checkpoint(path)
    (tmp_path / "m.m").write_bytes(written(source, "Q4_0"))
    found = DllamaCheckpoint(tmp_path / "m.m")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert found.stored(name)[1].tobytes() == blocks[2].tobytes()
    assert (found.get(name)[7, -32:] == 0.5).all()
    for each in found.names:
        assert torch.equal(found.get(each), source.get(each).float()), each


def test_a_file_runs_as_the_model_does(tmp_path: Path) -> None:
    model = model_of()
    (tmp_path / "m.m").write_bytes(bytes_of(model, "F32"))
    (tmp_path / "m.t").write_bytes(tokenizer_bytes(tokens(special_first=True)))
    ids = random_tokens(12, vocab_size=262)
    compiled = compile_model(
        load_model(tmp_path / "m.m"),
        load_precision("reference"),
        target="reference",
        options=CompileOptions(max_batch=1, max_context=32, compute="exact"),
    )
    expected = their_logits(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(prefill(compiled.executable, ids), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"renormalise": False}, "renormalise = False cannot be said in a .*; allowed: True"),
        ({"dense_layers": (1,)}, r"dense_layers = \(1,\) cannot be said in a dllama model; allo"),
        ({"expert_size": 24}, r"experts\.0\.down_proj\.weight has rows of 24 in Q4_0; allowed: a"),
    ],
)
def test_models_that_a_file_cannot_hold(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(saved(model_of(**changes), tmp_path))
    with pytest.raises(CheckpointError, match=words):
        written(checkpoint, "Q4_0")


def test_hybrids_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(make("qwen3_5_moe"), tmp_path))
    words = "model_type = qwen3_5_moe cannot be said in a dllama model; allowed: llama, qwen3, qwen"
    with pytest.raises(CheckpointError, match=words):
        written(checkpoint)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (7, 0, r"num_experts \(key 7\) = 0 is not read; allowed: 1 to 4096"),
        (8, 0, r"num_active_experts \(key 8\) = 0 is not read; allowed: 1 to 3"),
        (8, 4, r"num_active_experts \(key 8\) = 4 is not read; allowed: 1 to 3"),
        (21, 0, r"expert_size \(key 21\) = 0 is not read; allowed: 1 to"),
        (21, 33, r"down_proj\.weight has rows of 33 in Q4_0; allowed: a multiple of 32"),
        (7, 4, "cut short, or its header is not its own"),
        (7, 2, "bytes follow the last tensor, lm_head.weight"),
        (21, None, r"expert_size \(key 21\) = 0 is not read|expert_size \(key 21\) is missing"),
    ],
)
def test_headers_that_lie(key: int, value: int | None, words: str, tmp_path: Path) -> None:
    data = model_bytes("qwen3_moe", "Q4_0", random_weights("qwen3_moe", **MOE), **MOE)
    pairs = header_pairs("qwen3_moe", "Q4_0", **MOE)
    tail = data[len(header_bytes(pairs)) :]
    changed = [(k, value if k == key else v) for k, v in pairs if k != key or value is not None]
    (tmp_path / "m.m").write_bytes(header_bytes(changed) + tail)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=words):
        DllamaCheckpoint(tmp_path / "m.m")


def test_a_nan_in_one_expert_is_reported_with_its_tensors_name(tmp_path: Path) -> None:
    model, name = model_of(), "model.layers.0.mlp.experts.1.gate_proj.weight"
    model.checkpoint.tensors[name][3, 5] = torch.nan
    path = tmp_path / "m.m"
    path.write_bytes(bytes_of(model, "F32"))
    with pytest.raises(CheckpointError, match=rf"tensor {name} has values that are inf or NaN"):
        open_checkpoint(path).get(name)
    folder = saved(model, tmp_path / "hf")
    for weights in ("F32", "Q4_0"):
        with pytest.raises(CheckpointError, match=rf"tensor {name} has values that are inf or N"):
            written(open_checkpoint(folder), weights)


def test_a_byte_too_many_or_too_few(tmp_path: Path) -> None:
    data = bytes_of(model_of(), "Q4_0")
    for wrong in (data[:-1], data + b"\0", data[: len(data) // 2]):
        (tmp_path / "m.m").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"cut short|1 bytes follow the last tensor"):
            DllamaCheckpoint(tmp_path / "m.m")
    assert struct.unpack_from("<i", data)[0] == 0x0A00ABCD
