"""Load scenarios against a server in separate processes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server
from tilewright.cli.main import main
from tilewright.errors import TilewrightError
from tilewright.evaluate.load.chats import _common
from tilewright.evaluate.load.client import Client, ResponseTiming, connected, read_metrics
from tilewright.evaluate.load.contest import LEVELS, contest
from tilewright.evaluate.load.figures import Figures, rows_of, summary
from tilewright.evaluate.load.scenarios import SCENARIOS
from tilewright.evaluate.load.schemas import keeps
from tilewright.evaluate.load.shape import LoadConfig
from tilewright.evaluate.load.soak import _left

SMALL = LoadConfig(
    requests=12,
    concurrency=4,
    input_tokens=8,
    output_tokens=6,
    long_tokens=40,
    turns=2,
)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.evaluate.load.scenarios.SETTLE_SECONDS", 0.05)


def run(server: Server, name: str, shape: LoadConfig = SMALL) -> list[Figures]:
    async def ask() -> list[Figures]:
        async with connected(server.url, "any") as client:
            return await rows_of(SCENARIOS[name](client, shape))

    return asyncio.run(ask())


@pytest.mark.parametrize("name", ["streams", "overhead", "intruder", "chat", "invariant", "soak"])
def test_a_plan_ends_without_a_failed_request(server: Server, name: str) -> None:
    rows = run(server, name)
    assert rows and not any(row.get("failed") for row in rows), rows


def test_what_is_measured_is_there(server: Server) -> None:
    """Long answers have several chunks on any machine."""
    (row,) = run(server, "streams", LoadConfig(requests=3, rate=200.0, output_tokens=350))
    assert row["output_tokens"] == 1050
    assert {"ttft_ms_p50", "itl_ms_p99", "tpot_ms_p50"} <= row.keys()
    assert [each["users"] for each in run(server, "overhead")] == [1, 4]
    (chat,) = run(server, "chat")
    assert 0 < float(chat["cached_percent_of_shareable"]) <= 100
    (soak,) = run(server, "soak")
    assert soak["num_requests_running_growth"] == 0 and "engine_process_mb" in soak


class _Streaming(Client):
    """Records request times and answers in two chunks."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def stream(
        self, path: str, body: dict[str, Any], most: int | None = None
    ) -> ResponseTiming:
        self.events.append("asked")
        return ResponseTiming(times=[0.0, 1.0], count=2)


def test_an_intruder_is_made_before_there_is_a_stream_to_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    body = LoadConfig.body

    def drawn(*args: Any, **sizes: Any) -> dict[str, Any]:
        events.append("drawn")
        return body(*args, **sizes)

    monkeypatch.setattr(LoadConfig, "body", drawn)
    asyncio.run(rows_of(SCENARIOS["intruder"](_Streaming(events), SMALL)))
    assert events == ["drawn"] * 5 + ["asked"] * 5


class _Forgetful(Client):
    """Returns another answer at the third repetition of a request."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def whole(self, path: str, body: dict[str, Any]) -> ResponseTiming:
        self.asked[key := json.dumps(body)] += 1
        return ResponseTiming(text="other" if self.asked[key] == 3 else "same")

    async def stream(
        self, path: str, body: dict[str, Any], most: int | None = None
    ) -> ResponseTiming:
        await asyncio.sleep(1)
        return ResponseTiming()

    async def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return {"invariant": "greedy"}

    async def metrics(self) -> dict[str, float]:
        return {"snapshots_used": 3.0}


class _Remembering(Client):
    """Shares all earlier tokens between requests, like an engine with cached slots."""

    def __init__(self) -> None:
        self.known: list[list[int]] = []

    async def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        assert body is not None
        return {"tokens": self.tokens(body["messages"])}

    async def stream(
        self, path: str, body: dict[str, Any], most: int | None = None
    ) -> ResponseTiming:
        prompt = self.tokens(body["messages"])
        cached = max((_common(prompt, old) for old in self.known), default=0)
        said = {"role": "assistant", "content": "yes, and more"}
        self.known.append(self.tokens([*body["messages"], said]))
        heard = ResponseTiming(times=[0.1, 0.2], text=said["content"], count=4)
        heard.num_prompt, heard.num_cached = len(prompt), cached
        return heard

    def tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        return list("".join(each["content"] + "|" for each in messages).encode())


def test_what_is_shared_beyond_earlier_prompts_is_not_counted_as_shareable() -> None:
    (row,) = asyncio.run(rows_of(SCENARIOS["chat"](_Remembering(), SMALL)))
    assert row["cached_percent_of_shareable"] == 100
    assert 50 < float(row["cached_percent_of_prompts"]) < 100


def test_the_last_prompts_are_asked_again_with_an_empty_cache() -> None:
    class Slow(_Remembering):
        """Delays the first token in proportion to the computed prompt."""

        async def stream(
            self, path: str, body: dict[str, Any], most: int | None = None
        ) -> ResponseTiming:
            heard = await super().stream(path, body, most)
            heard.times = [1e-3 * (heard.num_prompt - heard.num_cached), 1.0]
            return heard

        async def status(self, path: str, data: bytes) -> int:
            assert path == "/reset_prefix_cache"
            self.known.clear()
            return 200

    (row,) = asyncio.run(rows_of(SCENARIOS["chat"](Slow(), replace(SMALL, flush=True))))
    cold, last = float(row["last_cold_ttft_ms_p50"]), float(row["last_ttft_ms_p50"])
    assert last < 0.5 * cold and row["last_of_cold"] == pytest.approx(last / cold)
    assert row["failed"] == 0

    class Full(Slow):
        """Rejects requests after a cache reset."""

        num_flushed = 0

        async def stream(
            self, path: str, body: dict[str, Any], most: int | None = None
        ) -> ResponseTiming:
            heard = await super().stream(path, body, most)
            heard.error = "full" if self.num_flushed > 1 else ""
            return heard

        async def status(self, path: str, data: bytes) -> int:
            self.num_flushed += 1
            return await super().status(path, data)

    (row,) = asyncio.run(rows_of(SCENARIOS["chat"](Full(), replace(SMALL, flush=True))))
    assert row["failed"] == SMALL.concurrency and row["why"] == "full"


def test_what_a_warm_cache_changes_and_what_holds_snapshots_is_told() -> None:
    (row,) = asyncio.run(rows_of(SCENARIOS["invariant"](_Forgetful(), SMALL)))
    assert row["answers_that_differ"] == 0 and row["answers_that_differ_warm"] == 12
    assert row["failed"] == 12
    assert asyncio.run(_left(_Forgetful())) == {"snapshots_used": 3.0}


def test_the_command_keeps_rows_and_says_when_a_request_failed(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.jsonl"
    argv = ["bench", "--url", server.url, "--requests", "2", "--output-tokens", "2"]
    assert main([*argv, "--results", str(kept), "--rounds", "2", "--warm-up", "0"]) == 0
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1] and rows[0]["plan"] == "streams"
    assert main([*argv, "--scenario", "contest", "--levels", "3"]) == 2
    assert "allowed: 1, 2, 4, 8, 16, 32, 64" in capsys.readouterr().err
    assert main([*argv, "--plan", "contests"]) == 2
    assert "did you mean 'contest'" in capsys.readouterr().err
    assert main([*argv, "--vocabulary", "2000000000", "--warm-up", "0"]) == 2
    assert "every request failed (status 400" in capsys.readouterr().err


@pytest.mark.parametrize("is_told", [False, True])
def test_the_contest_asks_the_same_at_each_level(is_told: bool) -> None:
    """Lengths for random weights come from the server or the command."""
    asked: list[dict[str, object]] = []

    class Told:
        async def fetch(self, path: str) -> object:
            return {"data": [{} if is_told else {"meta": {"weights": "random"}}]}

        async def whole(self, path: str, body: dict[str, object]) -> ResponseTiming:
            asked.append(body)
            return ResponseTiming(times=[0.0], count=2, num_prompt=3)

    shape = LoadConfig(output_tokens=1024, drawn_lengths=is_told)
    rows = asyncio.run(rows_of(contest(Told(), shape)))  # type: ignore[arg-type]
    assert [row.get("weight") for row in rows[:-1]] == [1, 1, 2, 2, 4, 4, 8]
    assert len(asked) == 66 * len(LEVELS) and rows[-1]["lengths"] == "drawn"
    lengths = [int(str(body["max_tokens"])) for body in asked]
    assert 200 < sum(lengths) / len(lengths) < 440 and max(lengths) <= 1024
    words = [{str(body["messages"]) for body in asked[at : at + 66]} for at in (0, 66)]
    assert words[0] == words[1] and len(words[0]) == 64
    # Another tokenizer and a single level give equal answer lengths.
    asked.clear()
    alone = replace(shape, input_tokens=7, levels=(2,))
    asyncio.run(rows_of(contest(Told(), alone)))  # type: ignore[arg-type]
    assert [int(str(body["max_tokens"])) for body in asked] == lengths[66:132]


@pytest.mark.parametrize("said", [200, 404])
def test_the_contest_empties_the_cache_before_every_level(said: int) -> None:
    flushed: list[str] = []

    class Told:
        async def fetch(self, path: str) -> object:
            return {"data": [{}]}

        async def status(self, path: str, data: bytes) -> int:
            flushed.append(path)
            return said

        async def whole(self, path: str, body: dict[str, object]) -> ResponseTiming:
            return ResponseTiming(error="no template")

    run = rows_of(contest(Told(), LoadConfig(flush=True, levels=(4, 64))))  # type: ignore[arg-type]
    if said == 200:
        rows = asyncio.run(run)
        assert [row.get("users") for row in rows] == [4, 64, None]
        assert rows[0]["failed"] == 64 and rows[0]["why"] == "no template"
        assert flushed == ["/reset_prefix_cache"] * 2 and "weighted_sum" not in rows[-1]
    else:
        with pytest.raises(TilewrightError, match=r"HTTP 404; --flush wants a server with --admin"):
            asyncio.run(run)


def test_good_answers_begin_soon_and_go_on_quickly() -> None:
    good, late = (
        ResponseTiming(times=[0.3, 0.37], count=4),
        ResponseTiming(times=[0.31, 0.32], count=4),
    )
    slow, whole = ResponseTiming(times=[0.1, 0.2], count=4), ResponseTiming(times=[0.1], count=4)
    assert (
        summary([good, late, slow, ResponseTiming(error="gone")], 2.0)["good_requests_per_second"]
        == 0.5
    )
    assert "good_requests_per_second" not in summary([whole], 2.0)


def test_a_summary_counts_a_chunk_s_tokens_and_wants_one_answer() -> None:
    heard = ResponseTiming(times=[0.5, 0.7, 0.9], count=5)
    figures = summary([heard, ResponseTiming(error="gone")], 2.0)
    assert figures["failed"] == 1 and figures["output_tokens_per_second"] == 2.5
    assert figures["itl_ms_p50"] == pytest.approx(100) and figures["tpot_ms_p50"] == 100
    with pytest.raises(TilewrightError, match=r"every request failed \(gone\)"):
        summary([ResponseTiming(error="gone")], 1.0)


def test_metrics_are_read_over_engines_and_by_part() -> None:
    text = (
        '# HELP x\ntilewright:host_seconds_sum{engine="0",part="schedule"} 1.5\n'
        'tilewright:host_seconds_sum{engine="1",part="schedule"} 0.5\n'
        'tilewright:step_seconds_bucket{le="1"} 9\nprocess_open_fds 12.0\n'
    )
    assert read_metrics(text) == {"host_seconds_sum[schedule]": 2.0, "process_open_fds": 12.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "a", "number": 5, "colours": ["red"]}', True),
        ('{"name": "a", "number": true, "colours": ["red"]}', False),
        ('{"name": "a", "number": 5, "colours": []}', False),
        ('{"name": "a", "number": 5, "colours": ["red"], "x": 1}', False),
        ('{"name": "a", "number": 5', False),
    ],
)
def test_an_answer_is_held_against_the_schema(text: str, expected: bool) -> None:
    assert keeps(text) is expected
