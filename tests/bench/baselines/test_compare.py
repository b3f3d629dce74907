"""``python -m bench compare``: bad arguments, rates, a real endpoint of ours, failed baselines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.baselines.compare import Measure, Options, measures_of
from bench.baselines.genai_server import handler
from bench.common import KINDS
from tests.cli.conftest import Refused
from tilewright.errors import TilewrightError
from tilewright.evaluate.load.client import COMPLETIONS, ResponseTiming, at_most, connected
from tilewright.evaluate.report.comparisons import read_parts


@pytest.mark.parametrize(
    "argv, said",
    [
        (("--pairs", "all-bfp8"), "'all-bfp8'"),
        (("--pairs", "all-bfp8=Q3_K"), "all-bfp8=Q3_K"),
        (("--pairs", "=Q8_0"), "'=Q8_0'"),
        (("--pairs", "no-such=Q8_0"), "no-such"),
        (("--pairs",), "--pairs"),
        (("--baselines", "vllm"), "'vllm'; allowed: llama.cpp, onnx-genai, openvino"),
        (("--threads", "0"), "--threads"),
        (("--rounds", "0"), "--rounds"),
        (("--prefill", "0"), "--prefill"),
        (("--prefill", "many"), "--prefill"),
        (("--context", "-1"), "--context"),
        (("--decode-tokens", "2"), "--decode-tokens"),
        (("--busy", "0"), "--busy"),
        (("--model", "no/such/model.gguf"), "no/such/model.gguf"),
        (("--llama-server", "no/such/program"), "there is no llama-server"),
        (("--json", "/"), "folder"),
        (("--unknown",), "--unknown"),
        (("word",), "word"),
    ],
)
def test_bad_arguments_are_refused(
    refused: Refused, tiny_gguf: Path, argv: tuple[str, ...], said: str
) -> None:
    sound = {"--pairs": "all-bfp8=Q8_0", "--model": str(tiny_gguf)}
    usual = [word for pair in sound.items() if pair[0] not in argv for word in pair]
    assert said in refused(*usual, *argv, verb="compare")


def test_what_a_pair_may_be_is_listed(refused: Refused) -> None:
    said = refused("--pairs", "all-bfp8:Q8_0", verb="compare")
    assert all(kind in said for kind in KINDS)


def test_a_round_has_prefill_users_and_busy_processes() -> None:
    found = measures_of(Options(users=(8, 32), busy=(1,)))
    assert [each.name for each in found] == [
        *("prefill-512", "decode-128-x8", "decode-128-x32", "decode-128", "decode-128-busy1"),
    ]
    assert [each.num_tokens for each in found] == [1, 128, 128, 128, 128]
    assert [each.num_busy for each in found] == [0, 0, 0, 0, 1]


def test_rates_by_hand() -> None:
    assert Measure("p", 512, 1).rate([ResponseTiming(ended=0.25, count=1)]) == 2048, (
        "a token without text"
    )
    one = ResponseTiming(began=10.0, times=[1.0, 1.5, 2.0, 2.5], count=4)
    assert Measure("d", 8, 4).rate([one]) == 2.0, "without the first token"
    # Chunks of two tokens. Both users decode from 11.5 to 12.5 only.
    other = ResponseTiming(began=11.0, times=[0.5, 1.0, 1.5, 2.0], count=8)
    assert Measure("d", 8, 4, 2).rate([one, other]) == 2 + 4
    with pytest.raises(TilewrightError, match="--decode-tokens"):
        Measure("d", 8, 4, 2).rate([one, ResponseTiming(began=20.0, times=[1.0, 2.0], count=2)])


def test_an_engine_without_a_server_is_an_endpoint() -> None:
    def generate(tokens: object, count: int) -> Iterator[int]:
        yield from range(count)

    async def ask(url: str) -> list[ResponseTiming]:
        async with connected(url, "any") as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 5}
            return (await at_most(2, [partial(client.stream, COMPLETIONS, body)] * 2))[0]

    made = handler(generate, threading.Lock())
    with ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = asyncio.run(ask(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    for heard in found:
        assert not heard.error and len(heard.times) == heard.count == 5
        assert heard.times[-1] <= heard.ended
        assert heard.num_prompt == 3


def test_ours_is_measured_although_baselines_fail(
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "tilewright.evaluate.measure.ceilings.read_bandwidth", lambda num_threads: 1e9
    )
    broken, output = tmp_path / "llama-server", tmp_path / "out" / "compare.json"
    broken.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    broken.chmod(0o755)
    argv = ["--model", str(tiny_gguf), "--pairs", "all-bfp4=Q4_0", "--threads", "1"]
    argv += ["--rounds", "1", "--prefill", "8", "--context", "8", "--decode-tokens", "64"]
    argv += ["--users", "--llama-server", str(broken), "--baselines", "llama.cpp"]
    assert main(["compare", *argv, "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "llama.cpp Q4_0: llama.cpp did not start: no memory" in printed
    assert "1 threads of" in printed and "Memory read rates are `1.0 to" in printed
    (record,) = read_parts(output).values()
    ours, other = record["contestants"]
    assert ours["failure"] is None and ours["step_bytes"] > 0 and ours["bandwidth_share"] > 0
    repeats = {name: len(rate["repeats"]) for name, rate in ours["rates"].items()}
    assert repeats == {"prefill-8": 1, "decode-8": 1}
    assert other["rates"] == {} and record["ratios"] == []
