"""Answers beside llama.cpp's: where they part and by how much; the real ones, slowly."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from bench.baselines.answers import (
    DEFAULT,
    EXACT,
    FLOAT_PEER,
    PAIRS,
    QUESTIONS,
    BranchPoint,
    Side,
    cell,
    llama_side,
    main,
    part_all,
    summary,
    table,
)
from tilewright.errors import TilewrightError


def side(answer: tuple[int, ...], logits: list[float]) -> Side:
    return Side(lambda prompt: answer, lambda text: np.array([*logits, float(len(text))]))


def test_answers_part_at_the_first_token_that_differs() -> None:
    """The gaps are those of the logits behind the prompt and what both have said before it."""
    sides = {DEFAULT: side((0, 1, 2), [0.0, 1.5, 1.0]), EXACT: side((0, 2), [0.0, 1.0, 3.0])}
    answers = {name: [each.answer(())] for name, each in sides.items()}
    (found,) = part_all([(7, 7)], answers, sides, (DEFAULT, EXACT))
    assert found == BranchPoint(1, (0.5, 2.0))
    assert cell(found) == "1 (by 0.5 and 2)"
    assert part_all([(7, 7)], answers, sides, (DEFAULT, DEFAULT)) == [None]
    lines = summary({(DEFAULT, EXACT): [found, None]})
    assert lines == [
        f"{DEFAULT} and {EXACT}: 1 of 2 answers token for token; the others part by 2 at the most"
    ]


def test_a_table_has_a_row_a_question() -> None:
    num = len(QUESTIONS)
    found = table(
        ["one | two\n" * 40] * num, {DEFAULT: [(1, 2)] * num}, dict.fromkeys(PAIRS, [None] * num)
    )
    assert len(found.rows) == num == 10
    assert found.rows[0][1].endswith("...") and found.rows[0][2:4] == ("2", "=")
    found.markdown()


@pytest.mark.slow
@pytest.mark.weights
def test_exact_answers_are_those_of_llama_cpp_in_float32(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if shutil.which("llama-server") is None:
        pytest.skip("llama-server is not in PATH (docs/benchmarks.md)")
    assert main(["--threads", "1"]) == 0
    assert f"{EXACT} and {FLOAT_PEER}: 10 of 10" in capsys.readouterr().out


class LlamaServer(BaseHTTPRequestHandler):
    """Answers as ``llama-server`` does: token ids, the reason to stop, log probabilities by id."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["temperature"] == 0 and not body["cache_prompt"]
        found: dict[str, Any] = {"tokens": [5, 6], "stop_type": "eos"}
        if "n_probs" in body:
            likely = [{"id": 3, "logprob": -0.5}, {"id": 1, "logprob": -2.0}]
            found = {"completion_probabilities": [{"id": 3, "top_logprobs": likely}]}
        self.send_response(200 if body["prompt"] else 500)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *words: object) -> None:
        """Requests are not logged."""


def test_llama_server_gives_tokens_and_logits() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), LlamaServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = llama_side(url, 8, 5, ends=[2])
        assert found.answer((1, 2)) == (5, 6, 2), "the end token is part of the answer"
        assert llama_side(url, 8, 5, ends=[6]).answer((1, 2)) == (5, 6)
        assert found.logits((1, 2)).tolist() == [-2.0, -2.0, -2.0, -0.5, -2.0]
        with pytest.raises(TilewrightError, match=r"llama\.cpp: "):
            found.answer(())
        server.shutdown()
