"""Named shapes: the table against published sizes, names that are none, and what a shape loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import prefill, random_tokens
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError
from tilewright.evaluate.report.perf_md import _MODELS
from tilewright.models import ShapeName, find_model, find_model_or_shape, load_model
from tilewright.models.architectures.table import model_types
from tilewright.models.config import DeltaShape, Llama3Scaling, LongRopeScaling, ModelConfig
from tilewright.models.shapes import SHAPES, parse_shape_name, shape_config, shape_names
from tilewright.models.sources import TensorSource

# Parameters as the models' cards and safetensors headers count them.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-11b": 8_030_261_248 + 8 * 4096,  # without cross layers and tower
    "llama-3.2-90b": 70_553_706_496 + 8 * 8192,
    "llama-2-70b": 68_976_648_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "phi-3-mini-128k": 3_821_079_552,
    "phi-3.5-mini": 3_821_079_552,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-35b-a3b": 34_660_610_688,  # of the text part, without the layer that drafts
}
# Their context, where it is not 131,072.
POSITIONS = {
    **{"llama-2-70b": 4096, "qwen3-8b": 40960, "qwen3-30b-a3b": 40960},
    **{"qwen2.5-0.5b": 32768, "qwen3.5-35b-a3b": 262144},
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_shape_has_the_published_number_of_weights(name: str, count: int) -> None:
    model = load_model(f"shape:{name}")
    assert sum(weight.numel() for weight in model.module.parameters()) == count
    assert all(weight.is_meta for weight in model.module.parameters())
    assert model.config.max_positions == POSITIONS.get(name, 131072)
    assert sum(meta.nbytes for meta in model.checkpoint.names.values()) == 2 * count


def test_the_rotations_are_the_published_ones() -> None:
    for name, factor in (("llama-3.2-1b", 32.0), ("llama-3.2-3b", 32.0), ("llama-3.1-8b", 8.0)):
        rope = shape_config(ShapeName(name)).rope
        assert rope.theta == 500000.0
        assert rope.scaling == Llama3Scaling(factor, 1.0, 4.0, 8192)
    rope = shape_config(ShapeName("qwen2.5-7b")).rope
    assert (rope.theta, rope.scaling) == (1000000.0, None)


def test_only_small_models_tie_their_embeddings() -> None:
    tied = {name for name, values in SHAPES.items() if values["tie_word_embeddings"]}
    assert tied == {"llama-3.2-1b", "llama-3.2-3b", "qwen2.5-0.5b"}


@pytest.mark.parametrize("name", shape_names())
def test_every_listed_shape_is_read_and_named(name: str) -> None:
    shape = parse_shape_name(name)
    assert shape is not None and str(shape) == name
    config = shape_config(shape)
    assert isinstance(config, ModelConfig)
    assert config.name == SHAPES[shape.name]["_name_or_path"]
    assert config.name.lower() == shape.name
    assert config.vocab_size >= 256, "the tokenizer's bytes need as many ids"


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - POSITIONS.keys()))
def test_display_names_are_those_of_published_rows(name: str) -> None:
    assert str(SHAPES[name]["_name_or_path"]) in _MODELS


def test_shapes_whose_architecture_is_missing_are_not_listed() -> None:
    listed = {name.removeprefix("shape:") for name in shape_names()}
    assert listed == {
        name for name, values in SHAPES.items() if values["model_type"] in model_types()
    }


def test_a_shape_is_found_in_any_case_and_a_path_is_no_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ShapeName("llama-3.1-8b")
    assert find_model_or_shape("shape:llama-3.1-8b") == wanted
    assert find_model_or_shape("Shape:Llama-3.1-8B") == wanted
    assert find_model_or_shape(wanted) == wanted
    assert parse_shape_name("shapes/tiny") is parse_shape_name("") is None
    monkeypatch.chdir(tmp_path)
    file = Path("shape:tiny.gguf")
    file.write_bytes(b"GGUF")
    assert find_model_or_shape("./shape:tiny.gguf") == find_model_or_shape(file) == file


@pytest.mark.parametrize(
    "text",
    [
        *("shape:", "shape: ", "shape:unknown", "shape:tiny ", "shape:tiny@main", "shape:shape:"),
        *("shape:tiny:model.gguf", "shape:owner/tiny", "shape:../tiny", "shape:a\nb", "shape:\0"),
        "shape:" + "x" * 5000,
    ],
)
def test_unknown_shapes_are_one_line_with_the_known_ones(text: str) -> None:
    for find in (find_model_or_shape, find_model, load_model):
        with pytest.raises(CheckpointError, match=r"unknown shape '.*allowed: shape:tiny, ") as got:
            find(text)
        length = len(str(got.value)) - len(", ".join(shape_names()))
        assert str(got.value).isprintable() and length < 100


def test_a_shape_of_an_architecture_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.models.shapes.model_types", lambda: ("llama",))
    with pytest.raises(CheckpointError, match=r"'qwen3' is not built yet; allowed: shape:tiny"):
        find_model_or_shape("shape:qwen3-8b")


def test_both_phis_have_longrope_of_their_own() -> None:
    """The attention factor is the one that microsoft's code computes: sqrt(1 + ln 32 / ln 4096)."""
    ropes = [shape_config(ShapeName(name)).rope for name in ("phi-3-mini-128k", "phi-3.5-mini")]
    assert all(rope.attention_factor == pytest.approx(1.1902380714238083) for rope in ropes)
    assert ropes[0] != ropes[1]
    for rope in ropes:
        assert isinstance(rope.scaling, LongRopeScaling)
        factors = rope.scaling.short_factors, rope.scaling.long_factors
        assert [len(each) for each in factors] == [48, 48] == [rope.num_pairs(96)] * 2
        assert all(list(each) == sorted(each) for each in factors)


def test_where_files_are_needed_a_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^shape:tiny: .*random weights.*allowed: a check"):
        find_model("shape:tiny")


def test_finding_a_shape_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tilewright.models import find_model_or_shape\n"
        "find_model_or_shape('shape:llama-3.1-70b'); "
        "print([n for n in ('torch', 'numpy', 'tokenizers', 'safetensors') if n in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_mixtures_are_the_published_ones() -> None:
    model = load_model("shape:qwen3.5-35b-a3b")
    config: Any = model.config
    assert len(model.checkpoint.names) == 693
    assert config.linear_layers == (True, True, True, False) * 10
    assert config.delta == DeltaShape(16, 32, 128, 128, 4)
    assert (config.rope.theta, config.rope.num_rotated) == (1e7, 64)
    assert (config.num_experts, config.experts_per_token, config.shared_size) == (256, 8, 512)
    shape = model.checkpoint.names["model.layers.39.mlp.experts.gate_up_proj"].shape
    assert shape == (256, 1024, 2048) and config.renormalise
    plain: Any = shape_config(ShapeName("qwen3-30b-a3b"))
    assert (plain.num_experts, plain.experts_per_token, plain.expert_size) == (128, 8, 768)
    assert plain.num_layers == 48 and not plain.dense_layers and plain.renormalise
    assert plain.shared_size == 0


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-hybrid"])
def test_norms_of_random_weights_are_around_one_as_they_are_used(name: str) -> None:
    """Also where a checkpoint has their difference from one."""
    model = load_model(f"shape:{name}")
    module: Any = model.module
    sources = module.sources()
    for parameter, _ in module.named_parameters():
        if parameter.endswith("norm.weight"):
            (source,) = sources.get(parameter, (TensorSource(parameter),))
            values = model.checkpoint.get(source.tensor).float() + source.offset
            assert abs(values.mean() - 1) < 0.05, parameter


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-hybrid"])
def test_the_tiny_mixtures_generate(name: str) -> None:
    compiled = compile_model(
        load_model(f"shape:{name}"),
        load_precision("bf16"),
        target="reference",
        options=CompileOptions(max_batch=1, max_context=32),
    )
    logits = prefill(compiled.executable, random_tokens(9, vocab_size=512), [4, 5])
    assert logits.isfinite().all() and logits.std() > 0.01
