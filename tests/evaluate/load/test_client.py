"""The load test's client against servers that stream in other ways than ours."""

from __future__ import annotations

import asyncio

import pytest

from tilewright.evaluate.load.client import ResponseTiming, connected

TEXT = 'data: {"choices": [{"text": "a"}]}\n\n'
LAST = 'data: {"choices": [{"text": "", "finish_reason": "stop"}], "usage": %s}\n\n'
USAGE = '{"completion_tokens": 1, "prompt_tokens": 2}'


async def _stream(*parts: str, closes: bool) -> ResponseTiming:
    has_read = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for part in parts:
            writer.write(part.encode())
            await writer.drain()
            await asyncio.sleep(0.05)  # a read of its own
        if not closes:
            await has_read.wait()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connected(f"http://127.0.0.1:{port}", "any") as client, asyncio.timeout(10):
            heard = await client.stream("/v1/completions", {"prompt": [1, 2]})
        has_read.set()
    return heard


@pytest.mark.parametrize("last", [LAST % USAGE, LAST % USAGE + "data: [DONE]\n\n"])
def test_a_stream_ends_with_its_usage_while_the_connection_is_open(last: str) -> None:
    heard = asyncio.run(_stream(TEXT + last, closes=False))
    assert (heard.error, heard.count, heard.num_prompt, heard.text) == ("", 1, 2, "a")


def test_a_stream_with_usage_in_every_chunk_ends_with_its_finish_reason() -> None:
    partial = 'data: {"choices": [{"text": "a"}], "usage": %s}\n\n'
    usages = [USAGE.replace("1", str(count), 1) for count in (1, 2, 3)]
    parts = partial % usages[0], partial % usages[1], LAST % usages[2]
    heard = asyncio.run(_stream(*parts, closes=False))
    assert (heard.error, heard.count, heard.text) == ("", 3, "aa")


def test_a_stream_without_usage_and_end_is_an_error() -> None:
    assert asyncio.run(_stream(TEXT, closes=True)).error == "no whole answer"
