"""Checkpoints written as dllama's ``.m`` files: the documented bytes, tensor by tensor."""

from __future__ import annotations

import dataclasses
import io
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.dllama_files import (
    MOE,
    header_bytes,
    header_pairs,
    model_bytes,
    random_weights,
    tokenizer_bytes,
    tokens,
)
from tests.models.conftest import tiny_hf_config, with_random_norms
from tests.tiny import prefill, random_tokens
from tilewright.compiler.driver import compile_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.base import Checkpoint, TensorMeta
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.dllama.checkpoint import DllamaCheckpoint
from tilewright.models.checkpoints.dllama.header import read_header
from tilewright.models.checkpoints.dllama.writer import write_model, write_tensors
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint
from tilewright.models.config import Llama3Scaling, RopeConfig

Q40 = get_format("q40")


def written(checkpoint: Checkpoint, weights: str = "F32") -> bytes:
    file = io.BytesIO()
    write_model(checkpoint, file, weights=weights, pack_q40=Q40.pack, progress=lambda *_: None)
    return file.getvalue()


def weights_of(model: Any) -> dict[str, np.ndarray]:
    found = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return {"lm_head.weight": found["model.embed_tokens.weight"], **found}


def saved(model: Any, folder: Path, **options: Any) -> SafetensorsCheckpoint:
    model.save_pretrained(folder, **options)
    return SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_is_byte_for_byte_as_documented(
    kind: str, tied: bool, tmp_path: Path, make_llama: Callable[..., Any]
) -> None:
    model = make_llama(tie_word_embeddings=tied)
    found = written(saved(model, tmp_path), kind)
    assert found[: 8 + 8 * 16] == header_bytes(header_pairs("llama", kind))
    assert found == model_bytes("llama", kind, weights_of(model))


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_a_qwen3_is_byte_for_byte_as_documented(kind: str, tmp_path: Path) -> None:
    """Its rows are not moved, its heads are normed; from shards, too."""
    torch.manual_seed(1)
    config = tiny_hf_config(transformers.Qwen3Config, tie_word_embeddings=False)
    model = with_random_norms(transformers.Qwen3ForCausalLM(config))
    checkpoint = saved(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert written(checkpoint, kind) == model_bytes("qwen3", kind, weights_of(model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_model_of_it_has_the_same_configuration_and_logits(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")
    changes = {"sliding_window": None} if kind == "Mistral" else {}
    config = tiny_hf_config(config, tie_word_embeddings=tied, initializer_range=0.2, **changes)
    model = with_random_norms(getattr(transformers, f"{kind}ForCausalLM")(config))
    (tmp_path / "m.m").write_bytes(written(saved(model, tmp_path / "hf")))
    (tmp_path / "m.t").write_bytes(tokenizer_bytes(tokens(special_first=True)))
    found = load_model(tmp_path / "m.m")
    source = SafetensorsCheckpoint(tmp_path / "hf").config
    assert found.config == dataclasses.replace(
        source,
        name="m",
        model_type="llama" if kind == "Mistral" else source.model_type,
        tie_embeddings=False,
    )
    ids = random_tokens(20, vocab_size=262)
    options = CompileOptions(max_batch=1, max_context=32, compute="exact")
    compiled = compile_model(
        found, load_precision("reference"), target="reference", options=options
    )
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(prefill(compiled.executable, ids), expected, atol=1e-4, rtol=1e-5)


class Dictionary:
    """A checkpoint of float32 arrays, for models whose module is not needed."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.path, self.weights = Path("dictionary"), weights
        self.names = {
            name: TensorMeta(value.shape, "F32", value.nbytes) for name, value in weights.items()
        }

    def get(self, name: str, rows: slice | None = None) -> torch.Tensor:
        return torch.from_numpy(self.weights[name][rows or slice(None)].copy())


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_experts_are_byte_for_byte_as_documented(kind: str) -> None:
    data = header_bytes(header_pairs("qwen3_moe", kind, **MOE))
    header, _ = read_header(memoryview(data), Path("m.m"))
    weights, file = random_weights("qwen3_moe", **MOE), io.BytesIO()
    checkpoint: Any = Dictionary(weights)
    tied, nothing = False, lambda *_: None
    write_tensors(checkpoint, file, header, tied=tied, pack_q40=Q40.pack, progress=nothing)
    assert file.getvalue() == model_bytes("qwen3_moe", kind, weights, **MOE)
    del checkpoint.names["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj.weight of shape \[32, 64\] is"):
        write_tensors(checkpoint, file, header, tied=tied, pack_q40=Q40.pack, progress=nothing)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_what_is_written_is_read(
    kind: str, tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    source = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", make_llama(), "Q8_0"))
    (tmp_path / "m.m").write_bytes(written(source, kind))
    found = open_checkpoint(tmp_path / "m.m")
    assert isinstance(found, DllamaCheckpoint)
    for name in source.names:
        values = source.get(name)
        if kind == "Q4_0" and values.ndim == 2 and "embed" not in name:
            values = Q40.round_trip(values)
        assert torch.equal(found.get(name), values.float()), name
    assert written(found, kind) == (tmp_path / "m.m").read_bytes()


def test_blocks_of_a_gguf_file_stay_the_same(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    model = make_llama()
    source = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model, "Q4_0"))
    found = written(source, "Q4_0")
    head = weights_of(model) | {
        "model.embed_tokens.weight": source.get("model.embed_tokens.weight")
    }
    expected = {name: np.asarray(value) for name, value in head.items()}
    assert found == model_bytes("llama", "Q4_0", expected)


def test_blocks_of_a_dllama_file_stay_the_same(tmp_path: Path) -> None:
    """Also those that no quantiser makes: whose largest value is not -8 scales."""
    data = bytearray(model_bytes("llama", "Q4_0", random_weights()))
    data[-18:] = np.float16(0.5).tobytes() + bytes([0x99] * 16)
    (tmp_path / "m.m").write_bytes(data)
    checkpoint = DllamaCheckpoint(tmp_path / "m.m")
    assert checkpoint.get("lm_head.weight")[-1, -1] == 0.5
    assert written(checkpoint, "Q4_0") == data


def test_scaled_rotation(tmp_path: Path, make_llama: Callable[..., Any]) -> None:
    scaling = {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
    checkpoint = saved(make_llama(rope_parameters=scaling), tmp_path)
    pairs = [pair for pair in header_pairs() if pair[0] != 12]
    pairs[-1:-1] = [(12, 500000), (14, 8), (15, 1), (16, 4), (17, 8192), (18, 2)]
    assert written(checkpoint).startswith(header_bytes(pairs))
    (tmp_path / "m.m").write_bytes(written(checkpoint))
    assert DllamaCheckpoint(tmp_path / "m.m").config.rope == checkpoint.config.rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequency_factors_of_a_gguf_file_are_recognised(
    factor: float, tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    plain = np.array(inverse_frequencies(RopeConfig(10000.0), 16), np.float32)
    scaled = np.array(inverse_frequencies(RopeConfig(10000.0, scaling), 16), np.float32)

    def source(name: str, factors: np.ndarray) -> GGUFCheckpoint:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", factors)

        return GGUFCheckpoint(write_gguf(tmp_path / name, make_llama(), extra=extra))

    (tmp_path / "m.m").write_bytes(written(source("a.gguf", plain / scaled)))
    assert DllamaCheckpoint(tmp_path / "m.m").config.rope.scaling == scaling
    (tmp_path / "m.m").write_bytes(written(source("b.gguf", np.ones_like(plain))))
    assert DllamaCheckpoint(tmp_path / "m.m").config.rope.scaling is None
    with pytest.raises(CheckpointError, match="rope_freqs = its own factors cannot be said"):
        written(source("c.gguf", plain / scaled * np.float32(1.01)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias = True cannot be said in a dllama model; allow"),
        ({"mlp_bias": True}, "mlp_bias = True cannot be said in a dllama model; allowed: False"),
        ({"rms_norm_eps": 1e-4}, "norm_eps = 0.0001 cannot be said in a .*; allowed: 1e-05, 1e-06"),
        ({"intermediate_size": 90}, "tensor .*down_proj.weight has rows of 90 in Q4_0; allowed"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}},
            "rope theta = 10000.5 cannot be said in a dllama model; allowed: a whole number",
        ),
    ],
)
def test_models_that_a_file_cannot_hold(
    changes: dict[str, Any], words: str, tmp_path: Path, make_llama: Callable[..., Any]
) -> None:
    checkpoint = saved(make_llama(**changes), tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        written(checkpoint, "Q4_0")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_other_architectures(tmp_path: Path, make_qwen2: Callable[..., Any]) -> None:
    checkpoint = saved(make_qwen2(), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"model_type = qwen2 cannot be said .*; allowed: llama"
    ):
        written(checkpoint)


class Changed:
    """A checkpoint with other tensors."""

    def __init__(self, source: Checkpoint, **tensors: torch.Tensor | None) -> None:
        self.source, self.path, self.config = source, source.path, source.config
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.names = dict(source.names)
        for name, tensor in self.tensors.items():
            if tensor is None:
                del self.names[name]
            else:
                self.names[name] = TensorMeta(tuple(tensor.shape), "F32", tensor.nbytes)

    def get(self, name: str, rows: slice | None = None) -> torch.Tensor:
        tensor = self.tensors.get(name)
        return self.source.get(name, rows) if tensor is None else tensor[rows or slice(None)]


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model__norm__weight": None}, r"tensor model.norm.weight of shape \[64\] is missing"),
        ({"model__norm__weight": torch.ones(3)}, r"model.norm.weight has shape \[3\]; .*\[64\]"),
        ({"other__weight": torch.ones(3)}, r"tensor other.weight of shape \[3\] is not part of"),
        (
            {"model__layers__0__self_attn__q_proj__weight": torch.full((64, 64), torch.nan)},
            "tensor model.layers.0.self_attn.q_proj.weight has values that are inf or NaN",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    kind: str,
    tensors: dict[str, Any],
    words: str,
    tmp_path: Path,
    make_llama: Callable[..., Any],
) -> None:
    checkpoint: Any = Changed(saved(make_llama(), tmp_path), **tensors)
    with pytest.raises(CheckpointError, match=words):
        written(checkpoint, kind)


def test_a_scale_beyond_float16_is_named(tmp_path: Path, make_llama: Callable[..., Any]) -> None:
    source, name = saved(make_llama(), tmp_path), "model__layers__1__mlp__up_proj__weight"
    checkpoint: Any = Changed(source, **{name: torch.full((96, 64), 6e5)})
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight has a Q4_0 block whose scale is inf"
    ):
        written(checkpoint, "Q4_0")
    written(checkpoint, "F32")


def test_a_large_tensor_is_never_whole_in_memory(tmp_path: Path) -> None:
    """A table of 64 MB goes through in pieces, of the file and of memory."""
    extra = {"vocab_size": 1 << 18, "num_layers": 1}
    (tmp_path / "m.m").write_bytes(
        model_bytes("llama", "F32", random_weights("llama", **extra), **extra)
    )

    class Nothing(io.RawIOBase):
        longest = 0

        def write(self, data: Any) -> int:
            self.longest = max(self.longest, len(data))
            return len(data)

    sink: Any = Nothing()
    checkpoint = DllamaCheckpoint(tmp_path / "m.m")
    tracemalloc.start()
    write_model(checkpoint, sink, weights="Q4_0", pack_q40=Q40.pack, progress=lambda *_: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sink.longest <= 1 << 24 and peak < 50 << 20


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_blocks_of_a_gguf_file_that_no_quantiser_makes_are_kept(
    name: str, tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Rows change places in both files, and whole blocks with them."""
    path = write_gguf(tmp_path / "m.gguf", make_llama(), "Q4_0")
    theirs = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}.get(name, "ffn_down")
    reader = gguf.GGUFReader(path).tensors
    (tensor,) = [each for each in reader if each.name == f"blk.1.{theirs}.weight"]
    odd = np.float16(0.5).tobytes() + bytes([0x99] * 16)
    data = bytearray(path.read_bytes())
    at = tensor.data_offset + 5 * tensor.n_bytes // tensor.data.shape[0]
    data[at : at + 18] = odd
    path.write_bytes(data)
    source = GGUFCheckpoint(path)
    (tmp_path / "m.m").write_bytes(written(source, "Q4_0"))
    full = f"model.layers.1.{name}.weight"
    found = DllamaCheckpoint(tmp_path / "m.m")
    dtype, blocks = found.stored(full)
    assert dtype == "Q4_0" and blocks.tobytes().count(odd) == 1
    assert torch.equal(found.get(full), source.get(full))
    row = int((source.get(full)[:, :32] == 0.5).all(dim=1).nonzero().item())
    assert (row == 5) == ("attn" not in name)
