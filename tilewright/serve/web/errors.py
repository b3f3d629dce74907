"""Errors for clients of OpenAI's API: a status, a message and a code."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_TYPES |= {404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error"}
_TYPES |= {413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error"}
_TYPES |= {500: "server_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An error that ends a request with a status and a body.

    Attributes:
        param: the invalid field of the request, as ``messages[3].role``.
        headers: response headers, as ``retry-after``.
        closes: whether the connection closes after the response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.message = " ".join(message.split())
        self.headers = dict(headers or {})
        self.closes = closes

    def body(self) -> bytes:
        """Return the error as JSON for clients."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for an invalid value."""
    return ApiError(400, code, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a known but unsupported field."""
    return ApiError(400, "unsupported", f"{param}: {message}", param=param)


def refuse(error: Exception, code: str = "invalid_value", param: str | None = None) -> ApiError:
    """Return the API error for a user's error from another layer."""
    return invalid(str(error), param, code)
