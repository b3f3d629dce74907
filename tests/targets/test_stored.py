"""Precision ``stored``: what reaches a target is what the format library reads from the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ggml_blocks import SHAPES, file_values, write_llama
from tests.models.quantized.folders import TOKENIZER
from tests.models.quantized.test_float8 import BLOCKS
from tests.models.test_experts_folder import rewritten, saved
from tests.models.test_experts_gguf import make
from tests.tiny import prefill, random_tokens
from tilewright.compiler.driver import compile_model, lower_model, resolve_precision, weight_source
from tilewright.compiler.formats import STORED_NAMES, get_format, stored_format
from tilewright.compiler.formats.ggml_blocks import SIZES
from tilewright.compiler.ir.recipe import WeightRecipe, load_stored, load_values
from tilewright.compiler.passes.runner import PassContext
from tilewright.compiler.precision import PrecisionConfig, load_precision, parse_heading
from tilewright.compiler.targets.contract.weight_storage import weight_uses
from tilewright.compiler.targets.cpu.onnxruntime.codes import stored_codes
from tilewright.compiler.targets.cpu.onnxruntime.numerics import NATIVE_BITS
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CompileError
from tilewright.models import LoadedModel, load_model

STORED = load_precision("stored")
TYPES = (*SIZES, "F32", "F16", "BF16")


def of_type(folder: Path, dtype: str) -> LoadedModel:
    return load_model(
        write_llama(folder / "typed.gguf", dict.fromkeys(SHAPES, dtype), embedding=dtype)
    )


def compiled(
    model: LoadedModel, target: str, precision: PrecisionConfig, compute: str = "exact"
) -> Executable:
    options = CompileOptions(max_context=32, compute=compute, num_threads=1)
    return compile_model(model, precision, target=target, options=options).executable


def matrices(model: LoadedModel, target: str) -> tuple[list[WeightRecipe], PassContext]:
    """The recipes of a lowered model's matrices."""
    resolved = resolve_precision(model, STORED)
    graph_module, ctx = lower_model(model, resolved, get_target(target).stages(), silent)
    uses = weight_uses(graph_module)
    return [use.recipe for use in uses if use.facts.tensor_group is not None], ctx


@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_the_librarys_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Products that are merged too, and the blocks that the cpu target multiplies with."""
    model = of_type(tmp_path, dtype)
    name, source = stored_format(dtype), weight_source(model)
    for target in ("reference", "cpu"):
        recipes, ctx = matrices(model, target)
        assert not [note for note in ctx.notes if "quantised again" in note]
        assert {recipe.format for recipe in recipes} == {name or "fp32"}
        in_blocks = name is not None and get_format(name).block > 1
        assert {recipe.is_stored for recipe in recipes} == {in_blocks}
        own = name is not None and STORED_NAMES[name] == dtype
        held = f"stored with equal values: {dtype} → {name or 'fp32'}"
        assert [note.startswith(held) for note in ctx.notes] == [] if own else [True]
        for recipe in recipes:
            expected = file_values(model, recipe.names)
            assert torch.equal(load_values(recipe, source), expected)
            if name not in NATIVE_BITS:
                continue
            data = load_stored(recipe, source, 0, recipe.num_rows)
            codes = stored_codes(data, tuple(expected.shape), name)  # type: ignore[arg-type]
            scales = codes.scales.repeat_interleave(codes.block, -1)
            assert torch.equal(codes.codes * scales, expected)
    assert {len(recipe.segments) for recipe in recipes} == {1, 2, 3}


def test_requantising_would_change_them(tmp_path: Path) -> None:
    """So that the equality above means something: blocks of a file are not what we would choose."""
    for dtype in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        model = of_type(tmp_path, dtype)
        values = model.checkpoint.get("model.layers.0.mlp.up_proj.weight")
        assert not torch.equal(get_format(str(stored_format(dtype))).round_trip(values), values)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "Q4_1", "Q6_K", "Q3_K", "IQ4_XS", "F16"])
def test_cpu_exact_is_the_reference_of_the_file(dtype: str, tmp_path: Path) -> None:
    model, tokens = of_type(tmp_path, dtype), random_tokens(9, vocab_size=262)
    expected = prefill(compiled(model, "reference", load_precision("reference")), tokens)
    assert torch.equal(prefill(compiled(model, "reference", STORED), tokens), expected)
    for compute, far in (("exact", 1e-5), ("fast", 0.05)):
        executable = compiled(model, "cpu", STORED, compute)
        distance = (prefill(executable, tokens) - expected).abs().max() / expected.abs().max()
        executable.close()
        assert distance < far


def test_parts_of_unequal_types_stay_apart(tmp_path: Path) -> None:
    types = dict.fromkeys(SHAPES, "Q4_0") | {"self_attn.v_proj": "Q6_K", "mlp.up_proj": "F16"}
    model = load_model(write_llama(tmp_path / "mixed.gguf", types, embedding="Q8_0"))
    recipes, ctx = matrices(model, "cpu")
    assert {len(recipe.segments) for recipe in recipes} == {1}
    assert [note.partition("(")[2] for note in ctx.notes] == [
        "formats q40, q6_k)",
        "formats fp16, q40)",
    ]
    tokens = random_tokens(9, vocab_size=262)
    expected = prefill(compiled(model, "reference", load_precision("reference")), tokens)
    executable = compiled(model, "cpu", STORED)
    torch.testing.assert_close(prefill(executable, tokens), expected, atol=1e-4, rtol=1e-4)
    executable.close()


@pytest.mark.parametrize(
    ("target", "dtype", "name"), [("cuda", "F32", "fp32"), ("n150", "Q4_1", "q41")]
)
def test_targets_without_the_values_refuse_them_by_name(
    target: str, dtype: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=rf"{name}.*allowed"):
        compiled(of_type(tmp_path, dtype), target, STORED, "fast")


def test_what_is_quantised_again_is_said_in_a_line(tmp_path: Path) -> None:
    types = dict.fromkeys(SHAPES, "Q4_1") | {"mlp.down_proj": "Q6_K"}
    model = load_model(write_llama(tmp_path / "mixed.gguf", types, embedding="Q8_0"))
    resolved = resolve_precision(model, load_precision("performance"))
    _, ctx = lower_model(model, resolved, get_target("reference").stages(), silent)
    assert ctx.notes == [
        "quantised again: Q4_1 → bfp4 (ff1_3); Q4_1 → bfp8 (wo, wqkv); Q6_K → bfp8 (ff2); "
        "Q8_0 → bf16 (embedding); Q8_0 → bfp8 (lm_head)"
    ]


def test_types_without_a_format_are_quantised_again_with_a_line(tmp_path: Path) -> None:
    model = of_type(tmp_path, "IQ4_XS")
    resolved = resolve_precision(model, load_precision("all-q80"))
    _, ctx = lower_model(model, resolved, get_target("reference").stages(), silent)
    assert ctx.notes == [
        "quantised again: IQ4_XS → bf16 (embedding); IQ4_XS → q80 (ff1_3, ff2, lm_head, wo, wqkv)"
    ]


def test_the_heading_says_stored_and_reads_back() -> None:
    resolved = STORED.resolve(4)
    heading = resolved.heading()
    assert heading.startswith("precision_cfg = {ff1_3: stored, ff2: stored, wqkv: stored, wo: stor")
    assert "lm_head: stored, embedding: stored, router: stored" in heading
    assert parse_heading(heading).resolve(4).id == resolved.id
    assert resolved.format("delta_gates", layer=0) == "stored"


def test_formats_without_a_kernel_of_cuda_become_others_with_a_line(tmp_path: Path) -> None:
    types = dict.fromkeys(SHAPES, "Q4_0") | {"mlp.down_proj": "IQ2_XS", "self_attn.v_proj": "F16"}
    model = load_model(write_llama(tmp_path / "mixed.gguf", types, embedding="F32"))
    recipes, ctx = matrices(model, "cuda")
    assert {recipe.format for recipe in recipes} == {"q40", "bf16"}
    assert {recipe.is_stored for recipe in recipes if recipe.format == "q40"} == {True}
    assert ctx.notes[:2] == [
        "quantised again: IQ2_XS → bf16 (ff2)",
        "rounded: F16 → bf16 (wqkv); F32 → bf16 (embedding, lm_head)",
    ]


def test_experts_in_codes_become_bfp8_on_cuda_with_a_line(tmp_path: Path) -> None:
    def coded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if "_proj" in name and "self_attn" not in name]:
            weight = tensors[name]
            tensors[name] = (weight * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.01)
        return tensors

    folder = rewritten(saved(make("qwen3_moe"), tmp_path), coded)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    recipes, ctx = matrices(load_model(folder), "cuda")
    assert {recipe.format for recipe in recipes if len(recipe.shape) == 3} == {"bfp8"}
    line = "quantised again: FP8 128x128 → bfp8 (experts_ff1_3, experts_ff2)"
    assert line in ctx.notes and any(note.startswith("rounded: F32 → bf16 (") for note in ctx.notes)
