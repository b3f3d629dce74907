"""Tiny Llamas and Qwen2s in both containers, written with the formats' own libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 262

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's reordering of q and k rows, as llama.cpp's convert_hf_to_gguf does it."""
    half = weights.shape[0] // num_heads // 2
    return (
        weights.reshape(num_heads, 2, half, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def tiny_hf_config(config_class: Any = transformers.LlamaConfig, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return config_class(**{**values, **changes})


def with_random_norms(model: Any) -> Any:
    """Norms and biases too, which transformers makes ones and zeros."""
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(weight, mean=1.0)
    return model


@pytest.fixture
def make_llama() -> Callable[..., transformers.LlamaForCausalLM]:
    """A random tiny Llama of transformers; keyword arguments change its configuration."""

    def make(**changes: Any) -> transformers.LlamaForCausalLM:
        torch.manual_seed(1)
        return with_random_norms(transformers.LlamaForCausalLM(tiny_hf_config(**changes)))

    return make


@pytest.fixture
def make_qwen2() -> Callable[..., transformers.Qwen2ForCausalLM]:
    """As `make_llama`, a Qwen2; its head size is hidden size / heads."""

    def make(**changes: Any) -> transformers.Qwen2ForCausalLM:
        torch.manual_seed(1)
        config = tiny_hf_config(transformers.Qwen2Config, **changes)
        return with_random_norms(transformers.Qwen2ForCausalLM(config))

    return make


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary of 262 tokens: two control, one user-defined, 256 bytes, 3 merges."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<|start|>", "<|im_end|>", "<think>", *alphabet, "he", "ll", "hell"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")


def add_pieces(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece vocabulary of 262 tokens: three control, 256 bytes, and the last three."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "▁a"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-9.0, -9.0, -1.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 3)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Writes a transformers model as GGUF: ``write(path, model, dtype, extra=callable)``.

    ``tokenizer`` writes the vocabulary's keys.
    """

    def write(
        path: Path,
        model: Any,
        dtype: str = "F32",
        extra: Callable[[gguf.GGUFWriter], None] | None = None,
        tokenizer: Callable[[gguf.GGUFWriter], None] = add_tokenizer,
    ) -> Path:
        config = model.config
        writer = gguf.GGUFWriter(path, config.model_type)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        tokenizer(writer)
        for name, weight in model.named_parameters():
            values = weight.detach().numpy()
            if config.model_type == "llama" and ".q_proj." in name:
                values = permute(values, config.num_attention_heads)
            if config.model_type == "llama" and ".k_proj." in name:
                values = permute(values, config.num_key_value_heads)
            kind = gguf.GGMLQuantizationType[dtype if values.ndim == 2 else "F32"]
            stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(to_gguf_name(name), stored, raw_dtype=kind)
        if extra is not None:
            extra(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
