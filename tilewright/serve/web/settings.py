"""API server configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.images.decode import ImageLimits

MAX_BODY = 8 << 20
"""Maximum size of a body."""
MAX_IMAGE_BODY = 32 << 20
"""Maximum size of a body if the model takes images."""


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
    """The API server's options in ``tilewright serve``.

    Attributes:
        names: model names. Responses contain the first. Empty: the checkpoint's name.
        template_variables: default variables for chat templates.
        tool_format: tool call format. None: detected from the chat template.
        defaults: sampling parameters for requests without them.
        pooling: Default pooling for embeddings: ``mean`` or ``last``.
        image_limits: Limits for the images of a request.
        metrics_prefix: ``tilewright`` or ``vllm``.
        replicas: resources per engine.
        hung_seconds: time without a finished step after which an engine restarts.
        write_timeout: maximum seconds without accepted bytes.
        has_admin: whether ``/slots`` and ``/reset_prefix_cache`` are served.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    strict_model: bool = False
    cors_origins: tuple[str, ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)
    replicas: tuple[Replica, ...] = (Replica(),)
    max_queue: int = 1024
    queue_timeout: float = 600.0
    drain_timeout: float = 30.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    ping_seconds: float = 15.0
    hung_seconds: float = 60.0
    max_connections: int = 2048
    pooling: str = "mean"
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    metrics_prefix: str = "tilewright"
    has_admin: bool = False
