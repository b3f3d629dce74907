"""Images on two ranks in processes of their own: each rank encodes, for both families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.images.test_image_chunks import COUNT, family  # noqa: F401
from tests.images.test_vision_models import chat_of, picture
from tests.images.tiny_vl import save_vl, tiny_vl
from tilewright import LLM
from tilewright.api import load
from tilewright.cli.main import main
from tilewright.compiler.driver import takes_images
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.loading.source import image_processor
from tilewright.models import load_model


def test_two_ranks_give_the_tokens_of_transformers(family: Any) -> None:  # noqa: F811
    """Chunks of five tokens cut images. The second image of a prefix is another one."""
    tests, model, folder = family
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_batched_tokens": 5}
    exact = {"precision": "reference", "compute": "exact", "use_cache": False}
    parts = [*tests.CHATS.values(), *((picture(32, 32, seed), "so?") for seed in (1, 1, 2))]
    with LLM(folder, target="cpu", max_seats=3, **ranks, **exact) as llm:
        assert "_tower" in vars(llm.compiled.executable.encoder), "a late tower delays a step"
        answers = llm.chat([chat_of(*each) for each in parts], max_tokens=COUNT, stop_token_ids=())
        for answer, each in zip(answers, parts, strict=True):
            assert list(answer.tokens) == tests.expected(model, llm, each, COUNT)


def test_a_folder_of_two_ranks_has_the_processor(tmp_path: Path) -> None:
    model, out = save_vl(tiny_vl(), tmp_path / "tiny"), str(tmp_path / "compiled")
    options = ["--target", "cpu", "--tensor-parallel-size", "2", "--precision", "reference"]
    assert main(["compile", "--model", str(model), "--output", out, *options]) == 0
    assert image_processor(load(out)) == image_processor(load(str(model)))


@pytest.mark.parametrize("name", ["tiny-vision", "tiny-hybrid-vision"])
def test_ranks_of_gpus_take_text(name: str) -> None:
    model, backend = load_model(f"shape:{name}"), get_target("cuda")
    found = [takes_images(model, backend, way) for way in (SINGLE_RANK, ParallelConfig(2))]
    assert found == [True, False]
