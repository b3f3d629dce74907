"""The way of the data, and what it refuses before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.models.test_gemma3_text import make as make_gemma3
from tests.models.test_qwen3_next import make as make_qwen3_next
from tests.tiny import compiled, lowered, pipeline, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.driver import compile_model, resolve_precision, weight_source
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.precision import list_precisions, load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import check_options
from tilewright.compiler.targets.table import get_target, target_names
from tilewright.errors import CheckpointError, CompileError, ConfigError

OPTIONS = CompileOptions(max_batch=2, max_context=32, compute="exact", num_threads=1)


ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("target", ["reference", "cpu", "null", ON_A_GPU])
def test_a_model_becomes_an_executable(target: str) -> None:
    model = tiny_model(num_layers=1)
    told: list[tuple[str, int, int]] = []
    result = compile_model(
        model,
        precision_of("bfp8"),
        target=target,
        options=OPTIONS,
        progress=lambda *news: told.append(news),
    )
    assert result.executable.vocab_size == 61
    assert result.executable.capabilities.max_num_seqs == 2
    assert result.executable.capabilities.max_context == 32
    assert graph_text(result.graph().graph) == graph_text(
        lowered(model, target=target, precision=precision_of("bfp8"))[0].graph
    )
    assert told[0] == ("trace", 0, 1)
    assert all(0 <= done <= total for _, done, total in told)
    result.executable.close()


def test_tests_that_share_a_trace_test_the_same_executable() -> None:
    model = tiny_model(std=0.2)
    tokens = random_tokens(9)
    ours = compile_model(model, precision_of("bfp4"), target="reference", options=OPTIONS)
    expected = prefill(ours.executable, tokens)
    assert torch.equal(prefill(compiled(model, precision=precision_of("bfp4")), tokens), expected)


def test_cpu_is_the_default_target() -> None:
    result = compile_model(tiny_model(num_layers=1), precision_of(), options=OPTIONS)
    assert type(result.executable).__name__ == "CpuExecutable"
    result.executable.close()


def test_weights_are_read_one_by_one_and_once() -> None:
    model = tiny_model()
    compile_model(model, precision_of("bfp8", embedding="bf16"), options=OPTIONS)
    assert set(model.checkpoint.reads) == set(model.checkpoint.tensors)
    twice = [name for name in set(model.checkpoint.reads) if model.checkpoint.reads.count(name) > 1]
    assert twice == ["model.embed_tokens.weight"], "held once as a table, once as a product"


def test_constants_come_from_the_model_and_weights_from_the_checkpoint() -> None:
    model = tiny_model()
    get = weight_source(model)
    assert torch.equal(
        get("model.rotary.inv_freq"), model.module.constants()["model.rotary.inv_freq"]
    )
    assert model.checkpoint.reads == []
    assert get("model.norm.weight") is model.checkpoint.tensors["model.norm.weight"]


def test_dumps_show_the_whole_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_DUMP", str(tmp_path / "dumps"))
    compile_model(tiny_model(num_layers=1), precision_of(), target="null", options=OPTIONS)
    names = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    expected = [current.name for current in pipeline("null")]
    assert names == [f"{number:02d}_{name}.txt" for number, name in enumerate(expected, start=1)]


def test_an_unwritable_dump_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_DUMP", str(tmp_path / "file" / "dumps"))
    with pytest.raises(ConfigError, match="TILEWRIGHT_DUMP"):
        compile_model(tiny_model(num_layers=1), precision_of(), target="null", options=OPTIONS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (CompileOptions(compute="quick"), ConfigError, "compute 'quick'; allowed: fast, exact"),
        (CompileOptions(max_batch=0), ConfigError, "batch size 0; allowed: 1 or more"),
        (CompileOptions(max_batch=-3), ConfigError, "batch size -3; allowed: 1 or more"),
        (CompileOptions(num_threads=0), ConfigError, "0 threads; allowed: 1 or more"),
        (CompileOptions(max_context=0), CompileError, "context of 0 .* allows 1 to 2048"),
        (CompileOptions(max_context=2049), CompileError, "context of 2049 .* allows 1 to 2048"),
    ],
)
def test_options_no_target_could_serve(
    options: CompileOptions, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        check_options(options, 2048)
    assert "\n" not in str(caught.value)


def test_good_options_pass() -> None:
    check_options(CompileOptions(max_batch=1, max_context=2048, num_threads=1), 2048)
    check_options(CompileOptions(max_context=1, compute="exact"), 1)
    for copies in ("auto", "none", "codes", "all"):
        check_options(CompileOptions(max_context=1, copies=copies), 1)


def test_options_are_checked_before_any_work() -> None:
    model = tiny_model()
    with pytest.raises(CompileError, match="the model allows 1 to 256"):
        compile_model(model, precision_of(), options=CompileOptions(max_context=257))
    assert model.checkpoint.reads == []


@pytest.mark.parametrize(
    "make", [tiny_model, make_gemma3, make_qwen3_next], ids=lambda f: f.__module__
)
def test_every_shipped_configuration_fits_every_kind_of_model(
    make: Callable[..., SimpleNamespace],
) -> None:
    """What a search found has rules for the layers of its own model."""
    for name in list_precisions():
        precision = load_precision(name)
        model = tiny_model(num_layers=30) if precision.layers else make()
        resolved = resolve_precision(model, precision)
        assert resolved.id == precision.resolve(model.config.num_layers, model.name).id


@pytest.mark.parametrize("rule", ["*.down_proj: {ff1_3: bf16}", "lm_head: {ff2: bf16}"])
def test_a_rule_without_an_effect_is_refused_before_any_work(rule: str) -> None:
    told: list[tuple[str, int, int]] = []
    with pytest.raises(ConfigError, match=r"heading: layers\..* has no effect on this model's"):
        compile_model(
            tiny_model(),
            precision_of("bfp8", layers=rule),
            options=OPTIONS,
            progress=lambda *news: told.append(news),
        )
    assert told == []


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gpu'; allowed: reference, null, cpu, cpu-native, cuda"):
        compile_model(tiny_model(), precision_of(), target="gpu", options=OPTIONS)
    assert [get_target(name).name for name in target_names()] == list(target_names())


@pytest.mark.parametrize("target", ["reference", "cpu", ON_A_GPU])
def test_a_tensor_of_another_shape_is_named(target: str) -> None:
    model = tiny_model(num_layers=1)
    name = "model.layers.0.mlp.down_proj.weight"
    model.checkpoint.tensors[name] = torch.zeros(32, 47)
    with pytest.raises(CheckpointError, match=rf"{name}.*\[32, 47\]; allowed: \[32, 48\]"):
        compile_model(model, precision_of("bfp8"), target=target, options=OPTIONS)


@pytest.mark.parametrize("name", ["fp32", "bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_a_tensor_with_nan_is_named(target: str, name: str) -> None:
    model = tiny_model(num_layers=1)
    tensor = model.checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"]
    tensor[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"k_proj\.weight' holds NaN or inf"):
        compile_model(model, precision_of(name), target=target, options=OPTIONS)


def test_rows_of_stacked_experts_are_counted_over_all_matrices() -> None:
    model = tiny_model(model_type="gpt_oss", num_experts=3, experts_per_token=2, expert_size=8)
    weights = weight_source(model)
    name = "model.layers.0.mlp.experts.gate_proj.weight"
    assert weights(name).shape[:2] == (3, 8)
    for first, last in ((0, 5), (7, 17), (23, 24)):
        assert torch.equal(weights.rows(name, first, last), weights(name).flatten(0, 1)[first:last])
