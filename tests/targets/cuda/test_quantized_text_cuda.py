"""Text of quantized files on a GPU: ``run``, ``serve`` and a compiled folder give the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_quantized_text import check_texts, run, write_case
from tests.ggml_blocks import SHAPES, write_llama


def write_gguf(path: Path) -> Path:
    """Write a file with matrices in Q4_0."""
    return write_llama(path / "one.gguf", dict.fromkeys(SHAPES, "Q4_0"), embedding="F16")


@pytest.mark.gpu(memory_gb=16)
@pytest.mark.parametrize("case", ["GGUF Q4_0", "FP8 blocks", "NVFP4 1x16", "gpt-oss MXFP4"])
def test_text_is_the_same_everywhere_and_exact_text_is_the_reference(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path) if case == "GGUF Q4_0" else write_case(case, tmp_path)
    exact = run(capfd, path, "--target", "cuda", "--compute", "exact")
    assert exact == run(capfd, path, "--target", "reference")
    check_texts(case, path, monkeypatch, capfd, "--target", "cuda", gpu_share="0.05")
