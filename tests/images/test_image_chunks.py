"""Chunks that cut an image's tokens in batches of text and images, for both families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.images import test_mllama_chats as mllama
from tests.images import test_vision_models as qwen
from tests.images.tiny_mllama import save_mllama, tiny_mllama
from tests.images.tiny_vl import save_vl, tiny_vl
from tilewright import LLM
from tilewright.compiler.targets.interface.step import PrefillChunk, Step, StepOutput

COUNT = 4


@pytest.fixture(scope="module", params=["qwen3_5", "mllama"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("images") / "tiny"
    if request.param == "mllama":
        model = tiny_mllama()
        return mllama, model, save_mllama(model, folder)
    model = tiny_vl()
    return qwen, model, save_vl(model, folder)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_chunks_and_mixed_batches_give_the_tokens_of_transformers(
    target: str, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, model, folder = family
    exact: dict[str, Any] = {} if target == "reference" else {"compute": "exact"}
    options = {**exact, "precision": "reference", "use_cache": False}
    with LLM(folder, target=target, max_seats=3, max_num_batched_tokens=5, **options) as llm:
        executable, chunks = llm.compiled.executable, list[PrefillChunk]()
        step = executable.step

        def recorded(given: Step) -> StepOutput:
            chunks.extend(given.prompts)
            return step(given)

        monkeypatch.setattr(executable, "step", recorded)
        chats = [tests.chat_of(*parts) for parts in tests.CHATS.values()]
        answers = llm.chat(chats, max_tokens=COUNT, stop_token_ids=())
        for answer, parts in zip(answers, tests.CHATS.values(), strict=True):
            assert list(answer.tokens) == tests.expected(model, llm, parts, COUNT)
    assert max(len(chunk.tokens) for chunk in chunks) <= 5
    cut = [rows for chunk in chunks for rows in chunk.images if rows.first]
    assert cut or tests is mllama, "no chunk cuts an image"
