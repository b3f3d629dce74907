"""gpt-oss: sinks, biased experts with a clamped SwiGLU, alternating windows, on every target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests import architecture_checks as checks
from tests.tiny import compiled, precision_of, prefill, random_tokens, tiny_model
from tests.twins import Twin, twin_of
from tilewright.compiler.driver import (
    compile_model,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.ir.recipe import load_dense
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.contract.weight_storage import weight_uses
from tilewright.compiler.targets.cuda.weights.experts import place_experts
from tilewright.compiler.targets.cuda.weights.packing import unpack
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CheckpointError, CompileError
from tilewright.models import load_model
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.config import RopeConfig, YarnScaling
from tilewright.models.sources import stored_shapes
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer

YARN = RopeConfig(150000.0, YarnScaling(4.0, 64, 1.1386294361119891, truncate=False))
ON_CUDA: dict[str, Any] = {
    **{"num_experts": 4, "experts_per_token": 2, "expert_size": 24, "intermediate_size": 24},
    **{"windows": (4,), "swiglu_limit": 0.5, "attention_bias": True, "output_bias": True},
}
SHAPES: dict[str, dict[str, Any]] = {
    "alternating": {"windows": (5, 0), "num_experts": 6},
    "untied": {"windows": (3, 0, 3), "num_layers": 3, "num_experts": 5, "tie_embeddings": False},
}


def _changes(config: Any) -> dict[str, Any]:
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "sliding_window": max(config.windows),
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ],
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        "attention_bias": config.attention_bias,
    }


def alternating(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' form: columns of gate and up in turns, transposed, and biases likewise."""
    found = {name: each for name, each in tensors.items() if ".mlp.experts." not in name}
    for path in {name.split(".experts.")[0] + ".experts" for name in tensors.keys() - found}:
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (tensors[f"{path}.{p}_proj.{kind}"] for p in ("gate", "up", "down"))
            both = torch.stack((gate, up), dim=2).flatten(1, 2)
            found[f"{path}.gate_up_proj{suffix}"] = both.transpose(1, 2).contiguous()
            found[f"{path}.down_proj{suffix}"] = down.transpose(1, 2).contiguous()
            if suffix:
                for part in ("gate_up", "down"):
                    found[f"{path}.{part}_proj_bias"] = found[f"{path}.{part}_proj_bias"][:, 0]
    return found


TWIN = Twin(transformers.GptOssConfig, transformers.GptOssForCausalLM, _changes, alternating)


def make(shape: str = "alternating", **changes: Any) -> Any:
    sizes = {"experts_per_token": 2, "expert_size": 24, "intermediate_size": 24, "rope": YARN}
    biases = {"attention_bias": True, "output_bias": True, "swiglu_limit": 0.5}
    values = {**sizes, **biases, **SHAPES[shape], **changes}
    return tiny_model(std=0.2, model_type="gpt_oss", **values)


NOT_READ: checks.NotRead = [
    ({"num_local_experts": None}, "num_local_experts is missing"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7"),
    ({"experts_per_token": 3}, "experts_per_token = 3 .*allowed: as num_experts_per_tok, 2"),
    ({"swiglu_limit": -1.0}, r"swiglu_limit = -1\.0"),
    ({"layer_types": ["full_attention"]}, "layer_types.*2 of full_attention"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
]


def test_sinks_and_the_clamp_matter() -> None:
    """The comparison with transformers above would not see parts without effect."""
    model, tokens = make(), random_tokens(19)
    expected = prefill(compiled(model), tokens)
    assert (prefill(compiled(make(swiglu_limit=100.0)), tokens) - expected).abs().max() > 1e-2
    for name in list(model.checkpoint.tensors):
        if name.endswith("sinks"):
            model.checkpoint.tensors[name] -= 100.0
    assert (prefill(compiled(model), tokens) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["bf16", "bfp8"])
def test_formats_on_native(name: str) -> None:
    tokens, model = random_tokens(19), make(hidden_size=64, expert_size=32, intermediate_size=32)
    precision = precision_of(name)
    expected = prefill(compiled(model, precision=precision), tokens)
    executable = compiled(model, "cpu-native", precision=precision)
    checks.assert_near(prefill(executable, tokens, [17, 1]), expected)
    executable.close()


def test_onnx_runtime_refuses_it_in_one_line() -> None:
    with pytest.raises(CompileError, match=r"sinks; allowed: --backend native") as caught:
        compiled(make(), "cpu")
    assert "\n" not in str(caught.value)


def write_mxfp4(model: Any, folder: Path, **changes: Tensor) -> dict[str, Tensor]:
    """Write a folder as published: MXFP4 blocks of random codes. Return the experts' values."""
    theirs = twin_of(model.config, model.checkpoint.tensors)
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator, values = torch.Generator().manual_seed(1), {}
    count, inner, hidden = model.config.num_experts, model.config.expert_size, 64
    for layer in range(model.config.num_layers):
        path = f"model.layers.{layer}.mlp.experts"
        for part, rows, columns in (
            ("gate_up", 2 * inner, hidden),
            ("down", hidden, inner),
        ):
            del tensors[f"{path}.{part}_proj"]
            size = (count, rows, columns // 32)
            blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 126, size, generator=generator, dtype=torch.uint8)
            tensors[f"{path}.{part}_proj_blocks"] = blocks
            tensors[f"{path}.{part}_proj_scales"] = scales
            dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            dense = dense.transpose(1, 2).contiguous()
            if part == "down":
                values[f"{path}.down_proj.weight"] = dense
                continue
            for first, name in enumerate(("gate", "up")):
                values[f"{path}.{name}_proj.weight"] = dense[:, first::2].contiguous()
    save_file(tensors | changes, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return values


def _wide() -> Any:
    sizes = {"hidden_size": 64, "expert_size": 32, "intermediate_size": 32, "num_layers": 1}
    return make(**sizes, windows=(5,))


def test_mxfp4_is_read_and_stored_exactly(tmp_path: Path) -> None:
    """transformers' own conversion is the reference."""
    model = _wide()
    values = write_mxfp4(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint, stored_shapes(model.module))
    name = "model.layers.0.mlp.experts.gate_proj.weight"
    for each, expected in values.items():
        assert torch.equal(checkpoint.get(each), expected), each
        assert checkpoint.stored_type(each) == "MXFP4"
    part = checkpoint.get(name, (slice(1, 3), slice(5, 20)), slice(8, 40))
    assert torch.equal(part, values[name][1:3, 5:20, 8:40])
    model.checkpoint.tensors.update(values)
    tokens = random_tokens(11)
    loaded = load_model(tmp_path, tokenizer=byte_tokenizer(300, "tiny"))
    with_file = compile_model(
        loaded,
        load_precision("stored"),
        target="cpu-native",
        options=CompileOptions(max_batch=1, max_context=32, compute="exact"),
    )
    expected = prefill(compiled(model), tokens)
    assert (prefill(with_file.executable, tokens, [7, 4]) - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scales": torch.full((6, 64, 2), 255, dtype=torch.uint8)}, "a scale that is NaN"),
        ({"scales": torch.ones(6, 64, 3, dtype=torch.uint8)}, r"is U8 \[6, 64, 3\]; allowed: U8"),
        ({"blocks": torch.ones(6, 64, 2, 8, dtype=torch.uint8)}, "has shape .*blocks x 16"),
        ({"blocks": torch.ones(6, 63, 2, 16, dtype=torch.uint8)}, "scales.*|even number"),
    ],
)
def test_malformed_mxfp4_is_one_line(
    changes: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    path = "model.layers.0.mlp.experts.gate_up_proj"
    write_mxfp4(_wide(), tmp_path, **{f"{path}_{name}": each for name, each in changes.items()})
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(tmp_path).get("model.layers.0.mlp.experts.gate_proj.weight")
    assert "\n" not in str(caught.value)


def test_blocks_along_outputs_are_noted_as_rounded(tmp_path: Path) -> None:
    write_mxfp4(_wide(), tmp_path)
    loaded = load_model(tmp_path, tokenizer=byte_tokenizer(300, "tiny"))
    resolved = resolve_precision(loaded, precision_of("bfp8", block_axis="out"))
    _, ctx = lower_model(loaded, resolved, get_target("cpu").stages(), silent)
    assert "quantised again: MXFP4 → bfp8 (experts_ff1_3, experts_ff2)" in ctx.notes


def test_mxfp4_experts_keep_their_codes_on_cuda(tmp_path: Path) -> None:
    """4.25 bits a weight, with the file's values, and a line for it."""
    values = write_mxfp4(_wide(), tmp_path)
    loaded = load_model(tmp_path, tokenizer=byte_tokenizer(300, "tiny"))
    resolved = resolve_precision(loaded, load_precision("stored"))
    stages = get_target("cuda").stages()
    graph_module, ctx = lower_model(loaded, resolved, stages, silent)
    assert "stored with equal values: MXFP4 → mxfp4 (experts_ff1_3, experts_ff2)" in ctx.notes
    recipes = [use.recipe for use in weight_uses(graph_module) if len(use.recipe.shape) == 3]
    recipes = [recipe for recipe in recipes if {*recipe.names} & {*values}]
    assert len(recipes) == 2 and {recipe.format for recipe in recipes} == {"mxfp4"}
    source = weight_source(loaded)
    for recipe in recipes:
        dense = load_dense(recipe, source).float()
        packed = place_experts(
            recipe, "mxfp4", source, torch.device("cpu"), paired=False, check=lambda *_: None
        )
        assert torch.equal(unpack(packed).view(dense.shape), dense)
