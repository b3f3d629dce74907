"""A tiny random Llama for commands, as a GGUF file and as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.__main__ import COMMANDS
from bench.__main__ import main as bench
from tests.models.conftest import add_tokenizer, permute, tiny_hf_config, to_gguf_name
from tilewright.cli.main import main
from tilewright.models import shapes

CONTEXT = 1536
"""Enough for token accuracy, not for the long contexts."""


def tiny_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = tiny_hf_config(max_position_embeddings=CONTEXT, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F32 with a byte-level vocabulary and a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    model = tiny_llama()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    add_tokenizer(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        for part, num_heads in heads.items():
            values = permute(values, num_heads) if part in name else values
        writer.add_tensor(to_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """Config, safetensors and tokenizer.json without a chat template. Tests may damage them."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    model = tiny_llama()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = ["<|start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def board_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """Heads have the width for boards. Two chips can share them."""
    heads = tiny_hf_config(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    transformers.LlamaForCausalLM(heads).save_pretrained(tmp_path / "heads")
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path / "heads")
    return tmp_path / "heads"


def change_shape(monkeypatch: pytest.MonkeyPatch, name: str, **changes: int) -> None:
    """Change a shape for a test, for example to fewer layers: tracing takes most of the time."""
    shape = {**shapes.SHAPES[name], **changes}
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, name: shape})


Refused = Callable[..., str]


def main_of(verb: str) -> Callable[[list[str]], int]:
    """Return the main function of ``python -m bench`` or ``tilewright`` for a command."""
    return bench if verb in COMMANDS else main


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Directory for results. A refused command must not write to it."""
    return tmp_path / "out" / "results.jsonl"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], results: Path) -> Refused:
    """Run ``tilewright bench`` and return its only error line, without the program name.

    Check the rules for user errors: exit code 2, a single line, no output and no files.
    """

    def run(*argv: str, verb: str = "bench") -> str:
        before = set(results.parent.parent.rglob("*"))
        options = ["--results", str(results)] if verb == "bench" else []
        assert main_of(verb)([verb, *options, *argv]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert set(results.parent.parent.rglob("*")) == before, "something was written"
        name, _, message = lines[0].partition(": ")
        assert name == "tilewright" and message
        return message

    return run


@pytest.fixture
def checkpoint(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A copy for tests that remove it."""
    return Path(shutil.copy(tiny_gguf, tmp_path / "tiny.gguf"))


Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command with exit code 0 and return its standard output."""

    def succeed(*argv: str | Path) -> str:
        assert main_of(str(argv[0]))([str(argument) for argument in argv]) == 0
        return capfd.readouterr().out

    return succeed
