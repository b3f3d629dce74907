"""`ServerConfig`: the API server's configuration. An option field is a flag of
``tilewright serve``.

Excludes `EngineConfig`, the engines' configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import ConfigError
from tilewright.images.decode import ImageLimits
from tilewright.options.arguments import integer, option, real
from tilewright.runtime.pooling import MEAN, POOLINGS
from tilewright.serve.tools.formats.table import FORMATS

MAX_BODY = 8 << 20
"""Maximum size of a body."""
MAX_IMAGE_BODY = 32 << 20
"""Maximum size of a body if the model takes images."""

MODEL = "model"
"""Value of ``--sampling-defaults``: use the checkpoint's ``generation_config.json``."""

_DEFAULTS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0, "top_p": 1.0},
    "openai": {"temperature": 1.0, "top_p": 1.0},
    MODEL: {},
}
_MAX_IMAGES = 64
_REQUESTS = "requests"


def _image_limits(text: str) -> ImageLimits:
    values = _json(text)
    count = values.get("image", 4) if isinstance(values, dict) else None
    is_valid = isinstance(values, dict) and values.keys() <= {"image"}
    if not is_valid or type(count) is not int or not 0 <= count <= _MAX_IMAGES:
        said = f"--limit-mm-per-prompt {text[:100]!r}"
        raise ConfigError(f'{said}; allowed: {{"image": N}}, N from 0 to {_MAX_IMAGES}')
    return ImageLimits(max_images=count)


def _variables(text: str) -> dict[str, Any]:
    variables = _json(text)
    if not isinstance(variables, dict):
        name = "--default-chat-template-kwargs"
        raise ConfigError(f"{name} {text[:100]!r}; allowed: a JSON object")
    return variables


def _json(text: str) -> Any:
    """Return a JSON value. None: the text is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """An engine's resources. Engines share nothing.

    Attributes:
        arguments: additional arguments for the engine's command.
        environment: additional environment variables.
        cores: the engine's CPUs. Empty: the API server's CPUs.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The configuration of the API server.

    Attributes:
        engines: resources per engine.
        max_queued_contexts: Maximum prompt tokens in the queue, in full contexts.
        write_timeout: Seconds after which a client that reads nothing is disconnected.
        hung_seconds: Seconds without a finished step after which an engine is restarted.
    """

    host: str = option("address to listen on", default="127.0.0.1")
    port: int = option("port to listen on, 0: any free port", default=8000, type=integer(0, 65535))
    replicas: int = option(
        "engines, each with its own GPUs or CPU cores. A request prefers the engine with "
        "its cached prefix, then the least loaded engine",
        "--replicas",
        "--data-parallel-size",
        default=1,
        group="engine",
        type=integer(1, 64),
    )
    api_key: tuple[str, ...] = option(
        "accepted API keys (repeatable)",
        default=(),
        group=_REQUESTS,
        metavar="KEY",
    )
    served_model_name: tuple[str, ...] = option(
        "accepted model names. Responses contain the first",
        default=(),
        group=_REQUESTS,
        metavar="NAME",
    )
    strict_model: bool = option("answer 404 to other model names", default=False, group=_REQUESTS)
    sampling_defaults: str = option(
        "sampling for requests without a temperature: greedy is 0, openai is 1, model reads "
        "generation_config.json",
        default="greedy",
        group=_REQUESTS,
        choices=tuple(_DEFAULTS),
    )
    chat_template: str | None = option(
        "Jinja file in place of the checkpoint's template", group=_REQUESTS, metavar="FILE"
    )
    tool_format: str | None = option(
        "tool call format (default: detected from the chat template)",
        group=_REQUESTS,
        choices=tuple(FORMATS),
    )
    limit_mm_per_prompt: ImageLimits = option(
        "maximum number of images per request, as '{\"image\": 4}'. 0 disables images",
        default=ImageLimits(),
        group=_REQUESTS,
        metavar="JSON",
        type=_image_limits,
    )
    allowed_media_domains: tuple[str, ...] = option(
        "host of images in http and https URLs, as example.org or example.org:8080 (repeatable, "
        "default: only data: URLs)",
        default=(),
        group=_REQUESTS,
        metavar="HOST",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        "variables for chat templates, as '{\"enable_thinking\": false}'",
        group=_REQUESTS,
        metavar="JSON",
        type=_variables,
    )
    cors_origins: tuple[str, ...] = option(
        "allowed origins of foreign web pages, '*': all",
        default=(),
        group=_REQUESTS,
        metavar="ORIGIN",
    )
    max_queue: int = option(
        "maximum waiting requests", default=1024, group=_REQUESTS, type=integer(1, 1 << 20)
    )
    queue_timeout: float = option(
        "maximum wait in the queue, in seconds",
        default=600.0,
        group=_REQUESTS,
        type=real(0, 1e6, above=True),
    )
    drain_timeout: float = option(
        "time for running requests at shutdown, in seconds",
        default=30.0,
        group=_REQUESTS,
        type=real(0, 1e6),
    )
    pooling: str = option(
        "embedding vector: mean over all tokens, or the last token",
        default=MEAN,
        group=_REQUESTS,
        choices=POOLINGS,
    )
    admin: bool = option("serve /slots and /reset_prefix_cache", default=False, group=_REQUESTS)
    metrics_names: str = option(
        "prefix for metric names",
        default="tilewright",
        group=_REQUESTS,
        choices=("tilewright", "vllm"),
    )
    engines: tuple[Replica, ...] = (Replica(),)
    max_queued_contexts: int = 64
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    ping_seconds: float = 15.0
    hung_seconds: float = 60.0
    max_connections: int = 2048

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables for chat templates if a request has none."""
        return self.default_chat_template_kwargs or {}

    @property
    def defaults(self) -> Mapping[str, float]:
        """Sampling parameters for requests without them."""
        return _DEFAULTS[self.sampling_defaults]
