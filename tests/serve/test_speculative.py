"""A server with n-gram drafts: equal answers, and reports about drafts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Server, Start, post
from tilewright.cli.main import main

CONFIG = (
    '{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, '
    '"num_speculative_tokens_per_batch_size": [[1, 4, 6]]}'
)
PROMPT = "one two three one two three one two three "


@pytest.fixture(scope="module")
def drafting(start_server: Start) -> Server:
    sizes = ("--max-num-seqs", "4", "--max-model-len", "512")
    started = start_server("--target", "cpu", *sizes, "--speculative-config", CONFIG)
    assert started.process.poll() is None, started.log.read_text()
    return started


def completed(server: Server, **changes: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 60, "return_token_ids": True, **changes}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": 2},
        {"temperature": 0.6, "seed": 5, "n": 3},
        {"stop": ["e", "a"]},
        {"max_tokens": 2},
        {"min_tokens": 20, "logit_bias": {"101": 2}},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_drafts_change_no_answer(drafting: Server, changes: dict[str, Any]) -> None:
    plain = completed(drafting, speculative=False, timings=True, **changes)
    assert "draft_n" not in plain["timings"]
    assert completed(drafting, **changes)["choices"] == plain["choices"]


def test_timings_metrics_and_props_report_drafts(drafting: Server) -> None:
    before = drafting.gauge("spec_decode_requests_without_drafts_total")
    timings = completed(drafting, timings=True)["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] >= 0 and timings["draft_n"] > 0
    completed(drafting, speculative=False)
    completed(drafting, presence_penalty=0.5)
    count = "spec_decode_requests_without_drafts_total"
    drafting.wait_until(lambda: drafting.gauge(count) == before + 2)
    accepted = drafting.gauge("spec_decode_num_accepted_tokens_total")
    assert drafting.gauge("spec_decode_num_accepted_tokens_per_pos_total") == accepted > 0
    assert drafting.gauge("spec_decode_num_draft_tokens_total") >= accepted
    assert drafting.gauge("spec_decode_num_drafts_total") > 0
    props = drafting.get("/props")["speculative_config"]
    assert props["method"] == "ngram" and props["num_speculative_tokens"] == 6
    assert props["without_drafts"] == ["penalties", "grammar", "opt_out"]


@pytest.mark.parametrize("text", ['{"method": ', '{"method": "ngram", "k": 1}'])
def test_wrong_options_end_a_command_with_a_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--prompt", "x", "--speculative-config", text]) == 2
    error = capsys.readouterr().err
    assert "--speculative-config" in error and "allowed: " in error and error.count("\n") == 1
