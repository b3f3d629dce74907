"""Text of quantized files: ``run``, ``serve`` and a compiled folder give the same on the CPU.

Matrices are those of packages.safetensors, random GGUF blocks, and folders of random codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.ggml_blocks import SCALES_AT, SHAPES, write_llama
from tests.grids import WHOLE_GRID
from tests.models.quantized.folders import write
from tests.models.quantized.package_models import together, write_model, write_tokenizer
from tests.models.quantized.test_float8 import BLOCKS, quantizer
from tests.models.test_gpt_oss import make, write_mxfp4
from tests.serve.conftest import Start, post, start_server
from tests.serve.engine_thread import EngineThread
from tests.serve.fronts import running_front
from tilewright.cli.commands.serve import _load_tokenizer
from tilewright.cli.main import main

__all__ = ["start_server"]

PROMPT, LENGTH = "Once upon a time", 8


def of_gguf(path: Path) -> Path:
    """Write all types into a single file."""
    types = cycle(SCALES_AT)
    layers = [dict(zip(SHAPES, types, strict=False)) for _ in range(-(-len(SCALES_AT) // 7))]
    return write_llama(path.with_suffix(".gguf"), *layers, embedding="Q6_K")


def of_fp8_blocks(path: Path) -> Path:
    write(path, quantizer((128, 128)), BLOCKS, sizes={"vocab_size": 258, "num_hidden_layers": 1})
    write_tokenizer(path)
    return path


def of_gpt_oss(path: Path) -> Path:
    model = make(hidden_size=64, expert_size=32, intermediate_size=32, vocab_size=258)
    write_mxfp4(model, path)
    write_tokenizer(path)
    return path


MODELS: dict[str, Callable[[Path], Path]] = {
    "GGUF": of_gguf,
    "FP8 blocks": of_fp8_blocks,
    "gpt-oss MXFP4": of_gpt_oss,
}
PACKAGES = together()
REPEATED = (
    *("GPTQ int2", "GPTQ int3", "GPTQ int4", "GPTQ int8", "GPTQ v2 int4", "GPTQ sym int4"),
    *("NVFP4 1x16", "bitsandbytes nf4 nested"),
)
"""Models whose readers other models have too."""
CASES = [
    pytest.param(name, marks=[WHOLE_GRID] if name in REPEATED else [])
    for name in (*MODELS, *PACKAGES)
]


def write_case(case: str, folder: Path) -> Path:
    """Return the path of a written model."""
    path = folder / case.replace(" ", "-")
    if case in MODELS:
        return MODELS[case](path)
    write_model(path, PACKAGES[case])
    return path


def run(capfd: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    """Return the text of ``tilewright run``."""
    argv = ("--prompt", PROMPT, "--max-tokens", str(LENGTH), "--num-threads", "1", "--json")
    assert main(["run", str(path), *argv, *options]) == 0
    text = json.loads(capfd.readouterr().out)["text"]
    assert isinstance(text, str)
    return text


def served(case: str, post: Callable[[str, Any], tuple[Any, ...]]) -> str:
    """Return the text of a server. ``run`` uses the chat template of the GGUF file."""
    body = {"max_tokens": LENGTH, "temperature": 0}
    if case.startswith("GGUF"):
        messages = [{"role": "user", "content": PROMPT}]
        status, answer, *_ = post("/v1/chat/completions", {**body, "messages": messages})
    else:
        status, answer, *_ = post("/v1/completions", {**body, "prompt": PROMPT})
    assert status == 200
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if case.startswith("GGUF") else choice["text"])


def check_texts(
    case: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *options: str,
    gpu_share: str = "",
) -> None:
    """Compare ``run``, ``run`` of a compiled folder and an engine of ``serve``.

    ``gpu_share``: The engine's share of GPU memory.
    """
    wanted = run(capfd, path, *options)
    assert wanted
    compiled = path.parent / "out"
    assert main(["compile", str(path), *options, "-o", str(compiled)]) == 0
    capfd.readouterr()
    assert run(capfd, compiled) == wanted
    monkeypatch.setattr("tilewright.serve.engines.process.Child", EngineThread)
    share = ("--gpu-memory-utilization", gpu_share) if gpu_share else ()
    command = ("{}", str(path), "--num-threads", "1", *options, *share)
    with running_front(command=command, load=lambda folder: _load_tokenizer(folder, None)) as front:
        assert served(case, front.post) == wanted


@pytest.mark.parametrize("case", CASES)
def test_run_serve_and_a_compiled_folder_give_the_same_text(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check_texts(case, write_case(case, tmp_path), monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*MODELS, *PACKAGES])
def test_server_processes_without_a_cache_give_the_text_of_run(
    case: str, tmp_path: Path, start_server: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_case(case, tmp_path)
    server = start_server("--no-use-cache", model=path)
    assert served(case, partial(post, server)) == run(capfd, path)
    server.process.terminate()
    server.process.wait(30)
