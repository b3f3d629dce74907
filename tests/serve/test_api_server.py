"""What a front does where its queue is full or its engine misbehaves, and what it tells of answers;
each row of the table of faults that needs no model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.fronts import Running, chat, is_idle, raw, running_front, wait_until
from tilewright.cli.arguments.serve import read_serve_options
from tilewright.errors import CheckpointError, TilewrightError
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.runtime.messages import EngineReady
from tilewright.serve.api_server import capacity
from tilewright.serve.output.choice import ChoiceStream
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.web.settings import ServerConfig


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    """One that all tests share which leave it as it was."""
    with running_front() as running:
        yield running
        assert is_idle(running)


def test_a_full_queue_is_429_and_who_waits_too_long_503() -> None:
    with running_front(ServerConfig(max_queue=2, queue_timeout=0.5)) as running:
        with running.connect() as client:
            client.sendall(raw(chat("W", n=2)))
            wait_until(lambda: running.front.client.num_waiting == 2)
            status, answer, headers = running.post("/v1/chat/completions", chat("a"))
            assert (status, answer["error"]["code"]) == (429, "overloaded")
            assert int(headers["retry-after"]) >= 1
        wait_until(lambda: is_idle(running), seconds=5)  # who is gone leaves the queue
        status, answer, headers = running.post("/v1/chat/completions", chat("W"))
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert headers["retry-after"] and is_idle(running)


def test_no_more_than_64_full_contexts_of_tokens_wait(front: Running) -> None:
    body = chat("x" * 4000 + "\nW", max_tokens=1, n=16)
    with front.connect() as client:
        client.sendall(raw(body) * 5)
        four = [front.connect() for _ in range(4)]
        for each in four:
            each.sendall(raw(body))
        wait_until(lambda: front.front.client.num_waiting == 64)
        assert front.post("/v1/chat/completions", chat("a"))[0] == 200
        status, answer, _ = front.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        for each in four:
            each.close()
    wait_until(lambda: is_idle(front), seconds=10)


@pytest.mark.parametrize(
    ("text", "stop", "least"), [("S", "z", 15.0), ("a", "d", 0.0)], ids=["slow", "at once"]
)
def test_an_answer_that_a_stop_string_ends_is_timed(text: str, stop: str, least: float) -> None:
    """The engine says nothing of one that was cancelled; all at once, its end is in the queue."""
    with running_front() as running:
        body = chat(text, stop=stop, max_tokens=1000 if text == "S" else 8, timings=True)
        timings = running.post("/v1/chat/completions", body)[1]["timings"]
        assert timings["predicted_n"] == 1 + ord(stop) - ord("a")
        assert timings["prompt_ms"] > 0 and timings["prompt_per_second"] > 0
        assert timings["predicted_ms"] > least and timings["predicted_per_second"] > 0
        told = running.ask("GET", "/metrics")[1].decode()
        for name in ("prefill_time", "decode_time", "inference_time", "time_per_output_token"):
            assert re.search(rf"request_{name}_seconds_count{{.*}} 1.0", told), name
        assert running.front.client._tracker._rate > 0


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_tells_timings_with_the_end_of_each_choice(front: Running, usage: bool) -> None:
    options = {"timings": True, "stream_options": {"include_usage": usage}}
    body = chat("a", n=2, seed=5, stream=True, **options)
    answer = front.ask("POST", "/v1/chat/completions", json.dumps(body).encode())[1]
    events = [json.loads(line[6:]) for line in answer.split(b"\n\n") if line.startswith(b"data: {")]
    ends = [each for each in events if each["choices"] and each["choices"][0]["finish_reason"]]
    assert [each["timings"]["seed"] for each in ends] == [5, 6]
    assert all(each["timings"]["predicted_n"] == 4 for each in ends)
    assert sum("timings" in each for each in events) == 2 + usage


def test_ids_to_echo_are_checked_first_and_decoded_aside() -> None:
    threads: list[str] = []

    class Coder(Tokenizer):
        def decode(
            self, ids: Iterable[int], skip_special: bool = True, *, after: Iterable[int] = ()
        ) -> str:
            threads.append(threading.current_thread().name)
            return super().decode(ids, skip_special, after=after)

    def load(folder: Path) -> TextCoder:
        return Coder(byte_tokenizer(256, "fake")._vocabulary)

    with running_front(load=load) as running:
        threads.clear()
        for bad in ([97] * 5000, [97, 10**9]):
            body = {"prompt": bad, "echo": True, "max_tokens": 1}
            assert running.post("/v1/completions", body)[0] == 400
        assert not threads
        body = {"prompt": [97] * 2000, "echo": True, "max_tokens": 1}
        assert running.post("/v1/completions", body)[1]["choices"][0]["text"] == "a" * 2001
        assert len(threads) == 1 and threads[0].startswith("texts")


def test_a_prompt_of_several_choices_is_counted_once(front: Running) -> None:
    def counts() -> list[float]:
        text = front.ask("GET", "/metrics")[1].decode()
        return [
            sum(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith(f"tilewright:{name}{{")
            )
            for name in (
                *("prompt_tokens_total", "prefix_cache_queries_total"),
                *("request_prompt_tokens_count", "request_params_n_count"),
                *("generation_tokens_total", "request_success_total"),
            )
        ]

    before = counts()
    status, found, _ = front.post("/v1/completions", {"prompt": "abcde", "n": 3, "max_tokens": 2})
    assert status == 200 and found["usage"]["prompt_tokens"] == 5
    spent = [after - known for after, known in zip(counts(), before, strict=True)]
    assert spent == [5, 5, 1, 1, 6, 3]


def test_prompts_are_scored_beside_the_event_loop(
    front: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    score = ChoiceStream.score_prompt

    def noted(choice: ChoiceStream, echo: Any) -> None:
        threads.append(threading.current_thread().name)
        score(choice, echo)

    monkeypatch.setattr(ChoiceStream, "score_prompt", noted)
    for streams in (False, True):
        body = {"prompt": "a" * 1000, "max_tokens": 1, "logprobs": 1, "echo": True}
        data = json.dumps({**body, "stream": streams}).encode()
        status, said, _ = front.ask("POST", "/v1/completions", data)
        assert status == 200 and said.count(b"-0.5") > 1000
    assert len(threads) == 2 and all(name.startswith("texts") for name in threads)


def test_a_start_says_what_it_holds(capfd: pytest.CaptureFixture[str]) -> None:
    with running_front():
        pass
    held = "ready: 4 slots of 4,096 tokens, 0.0 GB when all are full, prefix cache on"
    assert f"tilewright: {held}" in capfd.readouterr().out
    pool = EngineReady(
        9, 8, 1024, 1024, 100, 64, 3, cache_bytes=2_500_000_000, shares_prefixes=False
    )
    assert capacity(pool) == (
        "8 slots of 1,024 tokens, 100 pages of 64 tokens in 2.5 GB, 6,400 tokens or 6.2 full "
        "contexts, 3 snapshots, prefix cache off"
    )
    promised = EngineReady(9, 256, 1024, 1024, invariant="rows", invariant_rows=16)
    assert capacity(promised).endswith(", batch-invariant up to 16 running requests")


def test_a_star_lets_in_pages_that_know_the_server_by_another_name() -> None:
    with running_front(ServerConfig(cors_origins=("*",))) as running:
        headers = {"Origin": "http://box.lan:3000", "Host": "box.lan:8000"}
        status, _, said = running.ask("GET", "/v1/models", **headers)
        assert status == 200 and said["access-control-allow-origin"] == headers["Origin"]


@pytest.mark.parametrize(("what", "code"), [("N", "not_a_number"), ("F", "engine_error")])
def test_what_the_engine_gives_up_is_500_for_it_alone(front: Running, what: str, code: str) -> None:
    with front.connect() as beside:
        beside.sendall(raw(chat("S", max_tokens=50)))
        wait_until(lambda: front.front.client.num_live)
        status, answer, _ = front.post("/v1/chat/completions", chat(what))
        assert (status, answer["error"]["code"]) == (500, code)
        with front.connect() as client:
            client.sendall(raw(chat(what, stream=True)))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 500")  # nothing had been sent
        assert beside.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert front.front.client.num_restarts == 0


def engine_pid(running: Running) -> int:
    return running.front.client.engines[0].pid


@pytest.mark.parametrize("ends", ["SIGKILL", "SIGSTOP"])
def test_a_lost_engine_costs_what_ran_and_what_waited_is_served(ends: str) -> None:
    with running_front(ServerConfig(hung_seconds=1.0)) as running:
        with running.connect() as ran, running.connect() as waited:
            ran.sendall(raw(chat("S", stream=True, max_tokens=4000)))
            waited.sendall(raw(chat("W")))
            data = ran.recv(1 << 16)
            wait_until(lambda: running.front.client.num_waiting == 1)
            os.kill(engine_pid(running), getattr(signal, ends))
            while b'"error"' not in data:
                piece = ran.recv(1 << 16)
                assert piece, data[-300:]
                data += piece
            assert b'"engine_error"' in data and b"[DONE]" not in data
            assert b'"content":"abcd"' in waited.recv(1 << 16)
        assert running.front.client.num_restarts == 1
        assert running.post("/v1/chat/completions", chat("a"))[0] == 200


def test_an_engine_that_was_stopped_with_its_server_does_not_hang() -> None:
    """As in a container that is frozen for a while."""
    with running_front(ServerConfig(hung_seconds=2.0)) as running:
        pid, on_again = engine_pid(running), threading.Event()

        def go_on() -> None:
            os.kill(pid, signal.SIGCONT)
            on_again.set()

        def freeze() -> None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2.2)
            running.loop.call_later(0.2, go_on)

        running.loop.call_soon_threadsafe(freeze)
        assert on_again.wait(20)
        assert running.post("/v1/chat/completions", chat("a"))[0] == 200
        assert running.front.client.num_restarts == 0


def test_an_engine_that_ends_a_fourth_time_ends_the_server(front: Running) -> None:
    with running_front() as running:
        for _ in range(4):
            wait_until(lambda: running.front.health() == "ok")
            status, answer, _ = running.post("/v1/chat/completions", chat("C"))
            assert (status, answer["error"]["code"]) == (500, "engine_error")
        wait_until(running.front.client.ended.done)
        assert running.front.client.ended.result().startswith("1 the engine ended (exit code 3)")
        status, answer, headers = running.post("/v1/chat/completions", chat("a"))
        assert (status, answer["error"]["code"]) == (503, "engine_down")
        assert headers["retry-after"]
        assert json.loads(running.ask("GET", "/health")[1]) == {"status": "engine down"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CheckpointError("a.jinja: chat template: broken"), "2 a.jinja: chat template: broken"),
        (KeyError("vocab"), "1 KeyError: 'vocab'"),
    ],
)
def test_a_front_without_its_tokenizer_ends_and_says_why(error: Exception, said: str) -> None:
    def load(folder: Path) -> TextCoder:
        raise error

    with running_front(waits=False, load=load) as running:
        wait_until(running.front.client.ended.done, seconds=10)
        assert running.front.client.ended.result() == said
        assert json.loads(running.ask("GET", "/health")[1]) == {"status": "engine down"}


def test_a_template_that_does_not_compile_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}")
    with pytest.raises(TilewrightError, match=r"--chat-template .*broken\.jinja: .*endfor"):
        read_serve_options(["shape:tiny", "--chat-template", str(path)])


def test_before_the_engine_is_up_the_port_answers_503() -> None:
    with running_front(waits=False) as running:
        running.front.client.ready = None
        status, answer, headers = running.post("/v1/chat/completions", chat("a"))
        if running.front.client.ready is None:  # it was not up in between
            assert (status, answer["error"]["code"]) == (503, "loading")
            assert headers["retry-after"]
        assert running.ask("GET", "/live")[0] == 200


def load_pieces(folder: Path) -> TextCoder:
    """A SentencePiece vocabulary in which the fake engine's answer is the text `` a b c``."""
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<s>", "</s>", "▁", *letters]
    tokens += [f"<0x{byte:02X}>" for byte in range(97 - len(tokens))]
    tokens += [f"▁{letter}" for letter in letters]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([-float(97 - min(at, 97)) for at in range(len(tokens))], np.float32),
        "token_type": np.array([2, 3, 3, *([1] * (len(tokens) - 3))], np.int32),
        "bos_token_id": 1,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer(TokenizerSource(Path("m.gguf"), metadata))


def test_completion_of_a_sentencepiece_model_keeps_the_first_space() -> None:
    with running_front(load=load_pieces) as running:

        def ask(**more: Any) -> Any:
            body = {"prompt": "ab", "max_tokens": 3, "logprobs": 0, **more}
            return running.post("/v1/completions", body)[1]["choices"][0]

        plain, echoed, stopped = ask(), ask(echo=True), ask(stop=" a")
        assert plain["text"] == " a b c" and plain["logprobs"]["text_offset"] == [0, 2, 4]
        assert echoed["text"] == "ab a b c"
        assert echoed["logprobs"]["text_offset"][-3:] == [2, 4, 6]
        assert (stopped["text"], stopped["stop_reason"]) == ("", " a")
        body = {"prompt": "ab", "max_tokens": 3, "stream": True}
        answer = running.ask("POST", "/v1/completions", json.dumps(body).encode())[1]
        events = [json.loads(line[6:]) for line in answer.split(b"\n\n") if b"{" in line]
        assert "".join(each["choices"][0]["text"] for each in events) == " a b c"
