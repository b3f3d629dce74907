"""What an operator chooses of the front."""

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
    """What one of several engines has of its own; they share nothing.

    Attributes:
        arguments: what follows the command of all.
        environment: variables besides the front's own.
        cores: CPUs that it may run on; empty: those that the front may.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The front's part of ``tilewright serve``'s options.

    Attributes:
        names: what the model is called; the first is reported. Empty: its own name.
        template_variables: what chat templates may read, where a request says nothing else.
        tool_format: how calls of functions come; None: as the chat template's marks tell.
        defaults: sampling parameters of requests that do not say them.
        pooling: Pooling of embeddings that name none: ``mean`` or ``last``.
        image_limits: Limits for the images of a request.
        metrics_prefix: ``tilewright`` or ``vllm``.
        replicas: the engines, one for each.
        hung_seconds: how long no step may end before the engine is started again.
        write_timeout: how long a client may accept nothing of what it is sent.
        has_admin: whether it is told who has a slot, and caches are forgotten, when asked.
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
