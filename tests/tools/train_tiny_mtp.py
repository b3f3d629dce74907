"""Train a tiny Qwen3.5 with a draft layer on the bytes of a fixed text, and store it.

``python -m tests.tools.train_tiny_mtp`` writes `FILE` and its record. It takes a minute on a CPU
core. The final norm is wide and fixed: with a norm near 1, the draft layer's own norm would hide
a state before the norm.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.draft_layers import SHARED, block, layer_states, linear_block, norm, tiny_layer
from tests.tiny import tiny_model
from tilewright.models.config import DeltaShape, RopeConfig

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "tiny_mtp.safetensors"
RECORD = FILE.with_suffix(".json")
TEXT = FILE.with_name("tiny_mtp_text.xz")
TEXT_HASH = "9941cd9615f2e8ab083475159d77a91f10084d2610809136bc58f494d345acc2"
SIZES: dict[str, Any] = {
    "model_type": "qwen3_5",
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_layers": 2,
    "linear_layers": (False, False),
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "norm_eps": 1e-6,
    "shared_size": 0,
    "rope": RopeConfig(theta=1e4, num_rotated=16),
}
HYBRID: dict[str, Any] = {
    **SIZES,
    "hidden_size": 128,
    "num_layers": 4,
    "linear_layers": (True, True, True, False),
    "delta": DeltaShape(2, 4, 32, 32, 4),
}
"""Three layers with linear attention and one with attention. Training takes minutes."""
NUM_LINES, LENGTH = 32, 128
"""Held-out text: lines and their bytes, tensor ``text`` of the file."""
_STEPS, _BATCH, _CONTEXT, _WARM_UP, _RATE = 450, 16, 64, 40, 4e-3
_DRAFT_WEIGHT = 0.3


def tiny_mtp(
    tensors: dict[str, Tensor] | None = None, sizes: dict[str, Any] = SIZES
) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the model and its draft layer. None: random weights."""
    model = tiny_model(std=0.02, **sizes)
    layer = tiny_layer(model, std=0.02)
    for part, stored in ((model, "model.layers."), (layer, "mtp.layers.")):
        names = part.checkpoint.tensors
        for name in names if tensors is not None else ():
            assert tensors is not None
            names[name] = tensors[name.replace("model.layers.", stored)].float()
    return model, layer


def load() -> tuple[SimpleNamespace, SimpleNamespace, Tensor]:
    """Return the stored model, its draft layer, and held-out bytes ``[lines, length]``."""
    tensors = load_file(FILE)
    return *tiny_mtp(tensors), tensors["text"].long()


def states(tensors: dict[str, Tensor], tokens: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return the model's final states ``[B, T, hidden]`` before and after the norm."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer, is_linear in enumerate(config.linear_layers):
        run = linear_block if is_linear else block
        x = run(x, tensors, config, prefix=f"model.layers.{layer}")
    return x, norm(x, tensors["model.norm.weight"], config.norm_eps)


def train(
    text: Tensor, *, num_steps: int = _STEPS, sizes: dict[str, Any] = SIZES
) -> dict[str, Tensor]:
    """Return bfloat16 weights for model and draft layer."""
    torch.manual_seed(0)
    model, layer = tiny_mtp(sizes=sizes)
    tensors = {**model.checkpoint.tensors}
    for name, tensor in layer.checkpoint.tensors.items():
        if name not in SHARED:
            tensors[name.replace("model.layers.", "mtp.layers.")] = tensor
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.full_like(tensor, float("linear_attn" in name))
    tensors["model.norm.weight"] = torch.rand(sizes["hidden_size"]) * 2.9 - 0.9
    trained = [
        each.requires_grad_() for name, each in tensors.items() if name != "model.norm.weight"
    ]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / _WARM_UP, 0.5 * (1 + math.cos(math.pi * step / num_steps))),
    )
    for _ in range(num_steps):
        starts = torch.randint(len(text) - _CONTEXT - 2, (_BATCH,))
        lines = torch.stack([text[at : at + _CONTEXT + 2] for at in starts.tolist()])
        _, hidden = states(tensors, lines[:, :-2], model.config)
        head = tensors["model.embed_tokens.weight"]
        drafted = layer_states(tensors, model.config, lines[:, 1:-1], hidden, prefix="mtp.layers.0")
        loss = cross_entropy((hidden @ head.T).flatten(0, 1), lines[:, 1:-1].flatten())
        loss = loss + _DRAFT_WEIGHT * cross_entropy(
            (drafted @ head.T).flatten(0, 1), lines[:, 2:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    print(f"loss {loss.item():.3f}")
    return {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}


def training_text() -> bytes:
    """Return the bytes of `TEXT`: pages of the documentation at a fixed date."""
    text = lzma.decompress(TEXT.read_bytes())
    assert hashlib.sha256(text).hexdigest() == TEXT_HASH, f"{TEXT} is another text"
    return text


def content_key() -> str:
    """Return a hash for this script and its text. It names a cached model."""
    return hashlib.sha256(Path(__file__).read_bytes() + training_text()).hexdigest()


def made(num_steps: int = _STEPS, sizes: dict[str, Any] = SIZES) -> dict[str, Tensor]:
    """Return a trained model with its held-out text."""
    text = torch.tensor(list(training_text()))
    size = NUM_LINES * LENGTH
    return {
        **train(text[:-size], num_steps=num_steps, sizes=sizes),
        "text": text[-size:].view(NUM_LINES, LENGTH).to(torch.uint8),
    }


def main() -> None:
    """Write the model and its hash. Further entries in the record remain."""
    FILE.parent.mkdir(exist_ok=True)
    save_file(made(), FILE)
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps({**record, "sha256": digest}, indent=1) + "\n")


if __name__ == "__main__":
    main()
