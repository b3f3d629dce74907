"""Sampling parameters: HTTP fields, options and keywords come from the fields of the record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tilewright.cli.arguments.sampling import SamplingOptions
from tilewright.compiler.sampling.params import SamplingParams, plain_names, range_of, sampling_of
from tilewright.errors import ConfigError, RequestError
from tilewright.options.arguments import parse
from tilewright.serve.responses.request import ResponsesRequest
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.requests import CompletionRequest, decode, sampling_values


def body(**values: Any) -> bytes:
    return json.dumps({"prompt": "x", "input": "x", **values}).encode()


@pytest.mark.parametrize("name", plain_names())
def test_params_field_has_one_range_in_every_interface(name: str) -> None:
    span = range_of(name)
    flag, kind = f"--{name.replace('_', '-')}", type(span.low)
    parsed = parse(SamplingOptions, [flag, str(span.high)], prog="x", description="")
    assert getattr(parsed, name) == span.high
    for request in (CompletionRequest, ResponsesRequest):
        found, ignored = decode(body(**{name: span.high}), request)
        assert sampling_values(found) == {name: span.high} and name not in ignored  # type: ignore[arg-type]
        if span.off is not None:
            found, _ = decode(body(**{name: span.off}), request)
            assert sampling_values(found) == {name: span.low}  # type: ignore[arg-type]
        with pytest.raises(ApiError, match=name):
            decode(body(**{name: span.high + 1}), request)
    with pytest.raises(ConfigError, match=f"{flag}.*allowed: "):
        parse(SamplingOptions, [flag, str(span.high + 1)], prog="x", description="")
    with pytest.raises(RequestError, match=f"{name} .*; allowed: {str(span)[:3]}"):
        SamplingParams(**{name: kind(span.high + 1)})


def test_params_old_keyword_replaces_a_default() -> None:
    made = sampling_of({"end_tokens": [7]}, {"stop_token_ids": (1, 2)})
    assert made.stop_token_ids == (7,)
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'top_q'.*top_p"):
        sampling_of({"top_q": 1})
