"""dllama's files built apart from the code that reads and writes them, with gguf's quantiser."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4},
    **{"num_kv_heads": 2, "head_dim": 16, "vocab_size": 262, "max_positions": 512},
}
ARCHES = {"llama": 0xABCD00, "qwen3": 0xABCD01, "qwen3_moe": 0xABCD02}
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 3}
MOE = {"num_experts": 3, "num_active_experts": 2, "expert_size": 32}


def header_pairs(
    model_type: str = "llama", kind: str = "F32", **extra: int
) -> list[tuple[int, int]]:
    """Keys and values in the order of dllama's converter; ``extra`` are keys of `SIZES`."""
    sizes = {**SIZES, "num_experts": 0, "num_active_experts": 0, **extra}
    pairs = [(0, 0), (1, ARCHES[model_type]), (11, 1), (2, sizes["hidden_size"])]
    pairs += [(3, sizes["intermediate_size"]), (4, sizes["num_layers"]), (5, sizes["num_heads"])]
    pairs += [(6, sizes["num_kv_heads"]), (13, TYPES[kind]), (10, sizes["max_positions"])]
    pairs += [(9, sizes["vocab_size"]), (19, sizes["head_dim"]), (7, sizes["num_experts"])]
    pairs += [(8, sizes["num_active_experts"]), (12, 10000), (20, 5)]
    return pairs + ([(21, sizes["expert_size"])] if "expert_size" in sizes else [])


def header_bytes(pairs: Sequence[tuple[int, int]]) -> bytes:
    body = b"".join(struct.pack("<ii", *pair) for pair in pairs)
    return struct.pack("<ii", 0x0A00ABCD, 8 + len(body)) + body


def tensor_order(model_type: str, **extra: int) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether it has the type of weights, as the format's description has them."""
    s: dict[str, Any] = {**SIZES, **extra}
    hidden, inner = s["hidden_size"], s["intermediate_size"]
    q, kv = s["num_heads"] * s["head_dim"], s["num_kv_heads"] * s["head_dim"]
    order: list[tuple[str, tuple[int, ...], bool]] = [
        ("model.embed_tokens", (s["vocab_size"], hidden), False)
    ]
    for layer in range(s["num_layers"]):
        at, mlp = f"model.layers.{layer}.", f"model.layers.{layer}.mlp."
        order += [(f"{at}self_attn.{n}_proj", (r, hidden), True) for n, r in (("q", q), ("k", kv))]
        order += [(f"{at}self_attn.v_proj", (kv, hidden), True)]
        order += [(f"{at}self_attn.o_proj", (hidden, q), True)]
        blocks = [(mlp, inner)]
        if model_type == "qwen3_moe":
            order += [(f"{mlp}gate", (s["num_experts"], hidden), False)]
            blocks = [(f"{mlp}experts.{e}.", s["expert_size"]) for e in range(s["num_experts"])]
        for block, width in blocks:
            order += [(f"{block}gate_proj", (width, hidden), True)]
            order += [(f"{block}down_proj", (hidden, width), True)]
            order += [(f"{block}up_proj", (width, hidden), True)]
        if model_type != "llama":
            order += [(f"{at}self_attn.{n}_norm", (s["head_dim"],), False) for n in "qk"]
        order += [(f"{at}input_layernorm", (hidden,), False)]
        order += [(f"{at}post_attention_layernorm", (hidden,), False)]
    order += [("model.norm", (hidden,), False), ("lm_head", (s["vocab_size"], hidden), True)]
    return [(f"{name}.weight", shape, typed) for name, shape, typed in order]


def random_weights(model_type: str = "llama", **extra: int) -> dict[str, np.ndarray]:
    """float32, by Hugging Face's names and in its order of rows."""
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape, _ in tensor_order(model_type, **extra)
    }


def adjacent(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows half a head apart put beside each other."""
    rows = weights.reshape(num_heads, 2, -1, weights.shape[-1])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weights.shape)


def stored(values: np.ndarray, kind: str) -> bytes:
    return bytes(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes())


def model_bytes(
    model_type: str, kind: str, weights: Mapping[str, np.ndarray], **extra: int
) -> bytes:
    """A whole ``.m`` file."""
    parts = [header_bytes(header_pairs(model_type, kind, **extra))]
    for name, _, typed in tensor_order(model_type, **extra):
        values = weights[name]
        if model_type == "llama" and "q_proj" in name:
            values = adjacent(values, SIZES["num_heads"])
        if model_type == "llama" and "k_proj" in name:
            values = adjacent(values, SIZES["num_kv_heads"])
        parts.append(stored(values, kind if typed else "F32"))
    return b"".join(parts)


def tokenizer_bytes(
    tokens: Sequence[bytes],
    *,
    bos: int | None = 0,
    eos: Sequence[int] = (1,),
    template: bytes = b"{% for m in messages %}{{ m['content'] }}{% endfor %}",
    extra: Sequence[tuple[int, int]] = (),
) -> bytes:
    """A whole ``.t`` file."""
    pairs = [(0, 1), (1, len(tokens)), (2, max(map(len, tokens)))]
    pairs += [] if bos is None else [(3, bos)]
    pairs += [(7, len(template)), (9, len(eos)), *extra]
    body = b"".join(struct.pack("<ii", *pair) for pair in pairs)
    data = struct.pack("<ii", 0x567124, 8 + len(body)) + body + template
    data += b"".join(struct.pack("<i", index) for index in eos)
    for index, token in enumerate(tokens):
        data += struct.pack("<fI", -float(index), len(token)) + token
    return data


def tokens(*, special_first: bool = False) -> list[bytes]:
    """Two special tokens, every byte, and three that merges make: 262 with one user-defined."""
    special = [b"<|start|>", b"<|im_end|>", b"<think>"]
    regular = [*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell"]
    return [*special, *regular] if special_first else [*regular, *special]
