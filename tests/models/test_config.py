"""ModelConfig from config.json and from GGUF metadata: values, refusals, rope frequencies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tilewright.errors import CheckpointError
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.gguf.config import config_of_gguf
from tilewright.models.checkpoints.huggingface.config import config_of_hf, hf_values
from tilewright.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": 49152,
}


def from_hf(**changes: Any) -> ModelConfig:
    return config_of_hf({**HF, **changes}, where="smol/config.json")


def from_gguf(**changes: Any) -> ModelConfig:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return config_of_gguf({**GGUF, **named}, where="smol.gguf")


def test_hf_values() -> None:
    assert from_hf() == ModelConfig(
        name="smol",
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        tie_embeddings=True,
    )


def test_gguf_gives_the_same_configuration_as_hf() -> None:
    assert from_gguf() == from_hf()


def test_defaults_of_llama() -> None:
    config = from_hf(
        num_key_value_heads=None, tie_word_embeddings=None, rope_theta=None, rms_norm_eps=None
    )
    reference = transformers.LlamaConfig()
    assert config.num_kv_heads == 9
    assert config.tie_embeddings is reference.tie_word_embeddings
    assert config.norm_eps == reference.rms_norm_eps
    assert config.rope.theta == 10000.0
    assert not config.attention_bias and not config.mlp_bias


def test_biases_and_head_dim_are_read() -> None:
    config = from_hf(attention_bias=True, mlp_bias=True, head_dim=128, hidden_size=577)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, True)
    assert config.head_dim == 128


def test_qwen2_has_biases_on_q_k_and_v_alone() -> None:
    qwen2 = from_hf(model_type="qwen2", attention_bias=None)
    assert qwen2 == dataclasses.replace(from_hf(), model_type="qwen2", attention_bias=True)
    assert not qwen2.output_bias
    renamed = {key.replace("llama.", "qwen2."): value for key, value in GGUF.items()}
    renamed["general.architecture"] = "qwen2"
    assert config_of_gguf(renamed, where="smol.gguf") == qwen2


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": None},
        {"original_max_position_embeddings": 512, "factor": 16.0},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"beta_fast": 0, "beta_slow": None, "truncate": False},
        {"attention_factor": 0.75},
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        {"mscale": 1.0, "mscale_all_dim": 0},
    ],
)
def test_yarn_is_read_as_transformers_computes_it(changes: dict[str, Any]) -> None:
    said = {**HF, "rope_parameters": {**YARN, "rope_theta": 1e5, **changes}}
    said.pop("rope_theta", None)
    theirs = ROPE_INIT_FUNCTIONS["yarn"](transformers.LlamaConfig(**said), "cpu")
    ours = config_of_hf(said, where="smol/config.json")
    assert inverse_frequencies(ours.rope, ours.head_dim) == theirs[0].tolist()
    assert ours.rope.attention_factor == theirs[1]
    assert config_of_hf({**said, **hf_values(ours)}, where="smol/config.json") == ours


def test_yarn_lengthens_the_context_and_gguf_says_the_same() -> None:
    ours = from_hf(rope_scaling=YARN)
    assert ours.max_positions == 16384
    gguf = from_gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=4096,
    )
    assert gguf.rope == ours.rope and gguf.max_positions == 16384


def test_dynamic_scaling_is_plain_up_to_the_models_positions() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert from_hf(rope_scaling=dynamic) == from_hf()


WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}


@pytest.mark.parametrize(
    "changes",
    [
        {**WINDOW, "use_sliding_window": False},
        {**WINDOW, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 30},
        {**WINDOW, "sliding_window": None},
        {**WINDOW, "sliding_window": 8192},
        {**WINDOW, "max_window_layers": 30},
        {**WINDOW, "max_window_layers": 31},
        {**WINDOW, "layer_types": ["full_attention"] * 30},
    ],
)
def test_a_window_that_changes_nothing_is_read(changes: dict[str, Any]) -> None:
    assert from_hf(model_type="qwen2", **changes) == from_hf(model_type="qwen2")


def test_upper_layers_may_have_windows() -> None:
    qwen2 = from_hf(model_type="qwen2", **WINDOW)
    assert qwen2.windows == (0,) * 28 + (4096,) * 2
    assert [qwen2.window(layer) for layer in (0, 27, 28, 29)] == [0, 0, 4096, 4096]
    kinds = ["full_attention", "sliding_attention"] * 15
    assert from_hf(model_type="qwen2", **WINDOW, layer_types=kinds).windows == (0, 4096) * 15


def test_a_linear_scaling_is_read_from_either_container() -> None:
    scaled = RopeConfig(theta=100000.0, scaling=LinearScaling(4.0))
    assert from_hf(rope_scaling={"type": "linear", "factor": 4.0}).rope == scaled
    named = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert from_gguf(**named).rope == scaled
    assert from_gguf(llama__rope__scale_linear=4.0).rope == scaled
    plain = RopeConfig(theta=100000.0)
    assert from_gguf(**(named | {"llama__rope__scaling__type": "none"})).rope == plain


def test_a_snapshot_of_the_hub_is_called_as_its_repository() -> None:
    where = "/cache/models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/0123abcd/config.json"
    assert config_of_hf(HF, where=where).name == "Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": LLAMA3},
    ],
)
def test_both_spellings_of_llama3_rope(changes: dict[str, Any]) -> None:
    assert from_hf(**changes).rope == RopeConfig(
        theta=500000.0, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)
    )


def test_default_rope_parameters_carry_theta() -> None:
    rope = from_hf(
        rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ).rope
    assert rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "'gpt2'", "allowed: ", "llama, "]),
        ({"model_type": "config"}, ["model_type", "'config'", "allowed: "]),
        ({"model_type": None}, ["model_type", "None", "allowed: "]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"vocab_size": 0}, ["vocab_size = 0", "1 to"]),
        ({"vocab_size": True}, ["vocab_size = True"]),
        ({"vocab_size": "49152"}, ["vocab_size = '49152'"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers = -1"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers = 1000000000", "4096"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads = 2", "divisor of the 9 heads"]),
        ({"num_key_value_heads": 18}, ["num_key_value_heads = 18"]),
        ({"hidden_size": 577}, ["head_dim is missing", "577"]),
        ({"head_dim": 63}, ["head_dim = 63", "even"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps = 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps = nan"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "allowed: silu"]),
        ({"quantization_config": {"quant_method": "exl3"}}, ["quantization_config", "exl3"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings = 1", "true, false"]),
        ({"rope_theta": "big"}, ["rope_theta = 'big'"]),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2}},
            ["ntk", "default, linear, llama3, longrope, yarn, dynamic"],
        ),
        (WINDOW, ["use_sliding_window = True", "allowed: false"]),
        ({"layer_types": ["sliding_attention"] * 30}, ["layer_types", "full_attention for every"]),
        ({"model_type": "qwen2", **WINDOW, "sliding_window": -1}, ["sliding_window = -1"]),
        (
            {"model_type": "qwen2", "use_sliding_window": "yes"},
            ["use_sliding_window = 'yes'", "true, false"],
        ),
        (
            {"model_type": "qwen2", **WINDOW, "layer_types": ["full_attention"] * 29},
            ["layer_types", "30 of full_attention, sliding_attention"],
        ),
        (
            {"model_type": "qwen2", **WINDOW, "layer_types": ["linear_attention"] * 30},
            ["layer_types = 'linear_attention'", "full_attention, sliding_attention"],
        ),
        (
            {"model_type": "qwen2", "layer_types": ["linear_attention"] * 30},
            ["layer_types = 'linear_attention'", "30 of full_attention, sliding_attention"],
        ),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention"] * 30},
            ["layer_types = 'linear_attention'", "30 of full_attention, sliding_attention"],
        ),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0", "allowed: null"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
        ({"query_pre_attn_scalar": 256}, ["query_pre_attn_scalar = 256"]),
        ({"embedding_multiplier": 12.0}, ["embedding_multiplier = 12.0", "1.0"]),
        ({"logits_scaling": 8.0}, ["logits_scaling = 8.0"]),
        ({"clip_qkv": 8.0}, ["clip_qkv = 8.0"]),
        ({"num_local_experts": 8}, ["num_local_experts = 8"]),
        ({"use_qk_norm": True}, ["use_qk_norm = True", "allowed: false"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention = True"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5", "allowed: 1.0"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor is missing"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 3.0}},
            ["rope_scaling.mscale = 3.0", "allowed: keys "],
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            ["rope_scaling.mrope_section"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            ["rope_parameters.full_attention"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32}},
            ["rope_scaling.long_factor is missing", "a list of 32 numbers above 0"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["rope_scaling.short_factor = [1.0]", "a list of 32 numbers"],
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [0.0] * 32, "long_factor": [1.0] * 32}},
            ["rope_scaling.short_factor = 0.0", "numbers above 0"],
        ),
        ({"rope_scaling": 7}, ["rope_scaling = 7"]),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, ["factor = 0.5", "from 1"]),
        ({"rope_scaling": {**YARN, "beta_slow": 32}}, ["beta_fast = 32.0", "above beta_slow, 32"]),
        ({"rope_scaling": {**YARN, "turns": 3}}, ["turns"]),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, ["rope_theta = 1.0", "above 1"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["factor is missing"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling.low_freq_factor is missing"]),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor = 1.0"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, ["rope_scaling"]),
    ],
)
def test_hf_refusals_name_file_key_value_and_range(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_hf(**changes)
    message = str(caught.value)
    assert "\n" not in message
    for word in ["smol/config.json", *words]:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "gpt2"}, ["general.architecture", "'gpt2'", "llama, "]),
        ({"general__architecture": 7}, ["general.architecture", "7", "llama"]),
        ({"llama__attention__sliding_window": 512}, ["llama.attention.sliding_window = 512", "0"]),
        ({"llama__attn_logit_softcapping": 50.0}, ["llama.attn_logit_softcapping = 50.0"]),
        ({"llama__attention__scale": 0.3}, ["llama.attention.scale = 0.3"]),
        ({"llama__logit_scale": 0.3}, ["llama.logit_scale = 0.3"]),
        ({"llama__block_count": None}, ["llama.block_count is missing"]),
        ({"llama__attention__head_count": [9] * 30}, ["llama.attention.head_count"]),
        ({"llama__rope__scaling__type": "ntk"}, ["llama.rope.scaling.type = 'ntk'", "none"]),
        ({"llama__expert_count": 8}, ["llama.expert_count = 8", "0"]),
        ({"llama__rope__dimension_count": 32}, ["llama.rope.dimension_count = 32", "64"]),
        ({"llama__vocab_size": None}, ["llama.vocab_size is missing"]),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_gguf(**changes)
    for word in ["smol.gguf", *words]:
        assert word in str(caught.value)


def hf_inv_freq(**changes: Any) -> torch.Tensor:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        head_dim=64,
        max_position_embeddings=131072,
        **changes,
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    return rotary.inv_freq


def test_plain_frequencies_are_those_of_transformers() -> None:
    ours = torch.tensor(inverse_frequencies(RopeConfig(theta=100000.0), 64))
    theirs = hf_inv_freq(rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    assert torch.equal(ours, theirs)


def test_llama3_frequencies_are_those_of_transformers() -> None:
    assert "llama3" in ROPE_INIT_FUNCTIONS
    theirs = hf_inv_freq(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    rope = RopeConfig(theta=500000.0, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))
    ours = torch.tensor(inverse_frequencies(rope, 64))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    # The scaling does something: the slowest pair turns 32 times slower, the fastest is kept.
    plain = torch.tensor(inverse_frequencies(RopeConfig(theta=500000.0), 64))
    assert ours[0] == plain[0] == 1.0
    torch.testing.assert_close(ours[-1] * 32, plain[-1], rtol=1e-6, atol=0)


def test_gguf_factors_give_llama3_frequencies() -> None:
    """GGUF carries plain / scaled as a tensor; dividing by it gives the scaled ones back."""
    plain = torch.tensor(inverse_frequencies(RopeConfig(theta=500000.0), 64))
    scaled = hf_inv_freq(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    factors = tuple((plain / scaled).tolist())
    ours = inverse_frequencies(RopeConfig(theta=500000.0, freq_factors=factors), 64)
    torch.testing.assert_close(torch.tensor(ours), scaled, rtol=1e-6, atol=0)
