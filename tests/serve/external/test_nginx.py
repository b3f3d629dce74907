"""An nginx between clients and the server, which speaks HTTP/1.0 to it unless it is told not to."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.asked import Asked
from tests.serve.conftest import free_port
from tests.serve.external.programs import needs, running_program
from tests.serve.fronts import Running, chat, is_idle, running_front, wait_until

pytestmark = [pytest.mark.external, needs("nginx")]

CONFIG = """
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{upstream};
      {more}
    }}
  }}
}}
"""
UPSTREAMS = {
    "1.0": "",  # nginx's default
    "1.1": 'proxy_http_version 1.1; proxy_set_header Connection "";',
}


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    with running_front() as running:
        yield running


@pytest.fixture(scope="module", params=UPSTREAMS)
def nginx(
    request: pytest.FixtureRequest, front: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    """The proxy, for each version of HTTP towards the server."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    config = folder / "nginx.conf"
    more = UPSTREAMS[request.param]
    config.write_text(CONFIG.format(folder=folder, port=port, upstream=front.port, more=more))
    command = ["nginx", "-p", str(folder), "-c", str(config), "-e", "stderr"]
    with running_program(command, folder / "log"):
        proxy = Asked(port)
        wait_until(lambda: is_up(proxy))
        yield proxy


def is_up(proxy: Asked) -> bool:
    try:
        return proxy.ask("GET", "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def client_of(proxy: Asked) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0)


def test_stream_through_nginx_comes_piece_by_piece(nginx: Asked) -> None:
    """A token every 10 ms: the first ones are there long before the last one."""
    asked: dict[str, Any] = {"model": "any", **chat("S", max_tokens=100), "stream": True}
    times, text = [], ""
    for chunk in client_of(nginx).chat.completions.create(**asked):
        times.append(time.monotonic())
        text += chunk.choices[0].delta.content or ""
    assert len(text) == 100 and text.startswith("abc")
    assert len(times) > 10 and times[-1] - times[0] > 0.5, "nothing is collected on the way"


def test_stream_through_nginx_is_that_of_the_server(nginx: Asked, front: Running) -> None:
    for path, asked in (
        ("/v1/chat/completions", chat("a", n=2, stream=True)),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True}),
    ):
        data = json.dumps(asked).encode()
        status, body, headers = nginx.ask("POST", path, data)
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        direct = front.ask("POST", path, data)[1]
        assert len(events) == len(direct.split(b"\n\n"))


def test_answers_and_errors_pass_through_nginx(nginx: Asked, front: Running) -> None:
    client = client_of(nginx)
    asked: dict[str, Any] = {"model": "any", **chat("a")}
    assert client.chat.completions.create(**asked).choices[0].message.content == "abcd"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**asked, "temperature": -1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**{**asked, **chat("N", stream=True)})
    for method, path in (("HEAD", "/health"), ("DELETE", "/health"), ("GET", "/v1/models")):
        through, direct = nginx.ask(method, path), front.ask(method, path)
        assert through[:2] == direct[:2] and through[2].get("allow") == direct[2].get("allow")


def test_client_that_leaves_nginx_is_cancelled(nginx: Asked, front: Running) -> None:
    wait_until(lambda: is_idle(front))
    asked: dict[str, Any] = {"model": "any", **chat("S", max_tokens=4000), "stream": True}
    stream = client_of(nginx).chat.completions.create(**asked)
    next(iter(stream))
    assert front.front.client.num_live == 1
    stream.close()
    wait_until(lambda: is_idle(front), seconds=10)
