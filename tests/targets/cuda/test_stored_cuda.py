"""Precision ``stored`` on the cuda target: the codes of a file, in exact and in fast arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ggml_blocks import SHAPES, write_llama
from tests.models import test_gpt_oss
from tests.models.quantized import test_float4, test_packages
from tests.models.quantized.folders import Tensors, write
from tests.models.quantized.test_float8 import BLOCKS, quantizer
from tests.targets.test_stored import STORED, compiled
from tests.tiny import prefill, random_tokens
from tilewright.compiler.precision import load_precision
from tilewright.models import load_model
from tilewright.models.checkpoints.quantized.float8 import powers_of_two
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer


@pytest.mark.parametrize("dtype", ["Q4_0", "Q6_K"])
def test_file_of_one_type_is_near_the_reference(dtype: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "one.gguf", dict.fromkeys(SHAPES, dtype), embedding=dtype)
    check(path, random_tokens(5, vocab_size=262))


def test_file_of_several_types_is_near_the_reference(tmp_path: Path) -> None:
    names = ("Q4_1", "Q5_0", "Q5_1", "IQ4_XS", "Q4_K", "Q5_K", "Q3_K")
    types = dict(zip(SHAPES, names, strict=True))
    check(
        write_llama(tmp_path / "mixed.gguf", types, embedding="Q8_0"),
        random_tokens(3, vocab_size=262),
    )


FOLDERS = {
    "fp8": (quantizer((128, 128)), BLOCKS),
    "nvfp4": test_float4.CASES["nvfp4"][:2],
    "nf4": test_packages.CASES["bitsandbytes"][:2],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_of_float_codes_is_near_the_reference(name: str, tmp_path: Path) -> None:
    def in_bfloat16(tensors: Tensors) -> None:
        name = "model.embed_tokens.weight"  # and the head
        tensors[name] = tensors[name].bfloat16()

    write(tmp_path / name, *FOLDERS[name], change=in_bfloat16)
    check(tmp_path / name, random_tokens(3, vocab_size=96))


def test_mxfp4_experts_with_biases_are_near_the_reference(tmp_path: Path) -> None:
    sizes = {"expert_size": 32, "intermediate_size": 32, "hidden_size": 64, "num_layers": 1}
    model = test_gpt_oss.make(**{**test_gpt_oss.ON_CUDA, **sizes})
    test_gpt_oss.write_mxfp4(model, tmp_path)
    loaded = load_model(tmp_path, tokenizer=byte_tokenizer(300, "tiny"))
    tokens = random_tokens(3)
    expected = prefill(compiled(loaded, "reference", STORED), tokens)
    executable = compiled(loaded, "cuda", STORED, "fast")
    found = torch.as_tensor(prefill(executable, tokens))
    executable.close()
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("name", [*FOLDERS, "mxfp4"])
def test_a_device_decodes_with_the_bits_of_the_cpu(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    if name == "mxfp4":
        test_gpt_oss.write_mxfp4(
            test_gpt_oss.make(expert_size=32, intermediate_size=32, hidden_size=64), tmp_path
        )
    else:
        write(tmp_path, *FOLDERS[name])
    checkpoint: Any = load_model(tmp_path, tokenizer=byte_tokenizer(300, "tiny")).checkpoint
    decoding = checkpoint.on(device)
    for tensor in checkpoint.names:
        values, wanted = decoding.get(tensor), checkpoint.get(tensor)
        assert values.device.type == device.type and values.dtype == wanted.dtype
        assert torch.equal(values.cpu().view(torch.uint8), wanted.view(torch.uint8)), tensor
        if tensor in checkpoint._quantized and name != "mxfp4":
            blocks = decoding.stored_blocks(tensor)[1]
            assert blocks.device.type == device.type
            assert blocks.cpu().numpy().tobytes() == checkpoint.stored(tensor)[1].tobytes()


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(256, dtype=torch.uint8)
    wanted = torch.exp2(exponents.float() - 127)
    powers = powers_of_two(exponents)
    assert torch.equal(powers[:255], wanted[:255]) and bool(powers[255].isnan())


def check(path: Path, tokens: list[int]) -> None:
    model = load_model(path)
    expected = prefill(compiled(model, "reference", load_precision("reference")), tokens)
    for compute, far in (("exact", 1e-5), ("fast", 0.03)):
        executable = compiled(model, "cuda", STORED, compute)
        found = prefill(executable, tokens)
        notes = " ".join(executable.notes)
        is_nf4 = "nf4" in "+".join(map(model.checkpoint.stored_type, model.checkpoint.names))
        assert ("rounded: values of bitsandbytes nf4" in notes) == (is_nf4 and compute == "fast")
        executable.close()
        distance = (torch.as_tensor(found) - expected).abs().max() / expected.abs().max()
        assert distance < far, compute
