"""vLLM's side of a batch: what it is given, without vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from bench.batch import vllm_offline

LENGTHS = (3, 9, 5)


class Engine:
    """Answers each prompt to the length that is asked, and keeps what was given."""

    given: ClassVar[dict[str, Any]] = {}
    prompts: ClassVar[list[list[int]]] = []
    """Of every run behind the first, which warms up."""

    def __init__(self, **options: Any) -> None:
        Engine.given = options

    def generate(self, asked: list[Any], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        Engine.prompts.append([token for each in asked for token in each["prompt_token_ids"]])
        ids = [list(range(each["max_tokens"])) for each in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in ids]


@pytest.mark.parametrize(
    ("options", "orders"),
    [
        ([], ["file"]),
        (["--quantization", "fp8", "--orders", "longest", "file"], ["longest", "file"]),
    ],
)
def test_rows_come_in_the_orders_that_are_asked_for(
    options: list[str],
    orders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    Engine.prompts.clear()
    rows, bodies = tmp_path / "rows.jsonl", [{"prompt": [n], "max_tokens": n} for n in LENGTHS]
    rows.write_text("\n".join(json.dumps({"body": body}) for body in bodies))
    assert vllm_offline.main([str(tmp_path), str(rows), "--seats", "7", *options]) == 0
    expected = {"file": [3, 9, 5], "longest": [9, 5, 3]}
    assert Engine.prompts == [[3, 9], *(expected[order] for order in orders)]
    assert Engine.given["max_num_seqs"] == 7
    assert Engine.given["quantization"] == ("fp8" if options else None)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["order"] for each in found] == orders
    for each in found:
        assert (each["rows"], each["prompt_tokens"], each["output_tokens"]) == (3, 3, 17)
