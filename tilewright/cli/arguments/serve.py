"""Options of ``tilewright serve``, checked before any heavy import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import ConfigError
from tilewright.images.decode import ImageLimits
from tilewright.options.arguments import (
    Parser,
    add_options,
    integer,
    option,
    real,
    values_of,
)
from tilewright.options.config_file import (
    ConfigArguments,
    PathArguments,
    read_config,
    with_config,
)
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve
from tilewright.runtime.pooling import MEAN, POOLINGS
from tilewright.serve.tools.formats.table import FORMATS

if TYPE_CHECKING:
    from tilewright.cli.arguments.ask import Sign

MODEL = "model"
"""Value of ``--sampling-defaults``: use the checkpoint's ``generation_config.json``."""

_DEFAULTS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0, "top_p": 1.0},
    "openai": {"temperature": 1.0, "top_p": 1.0},
    MODEL: {},
}
_MAX_KEYS = 1024
_MAX_IMAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServeArgs:
    sampling_defaults: str = option(
        "sampling for requests without a temperature: greedy is 0, openai is 1, model reads "
        "generation_config.json",
        default="greedy",
        group="requests",
        choices=tuple(_DEFAULTS),
    )
    chat_template: str | None = option(
        "Jinja file in place of the checkpoint's template", group="requests", metavar="FILE"
    )
    tool_format: str | None = option(
        "tool call format (default: detected from the chat template)",
        group="requests",
        choices=tuple(FORMATS),
    )
    limit_mm_per_prompt: str = option(
        "maximum number of images per request, as '{\"image\": 4}'. 0 disables images",
        default='{"image": 4}',
        group="requests",
        metavar="JSON",
    )
    default_chat_template_kwargs: str | None = option(
        "variables for chat templates, as '{\"enable_thinking\": false}'",
        group="requests",
        metavar="JSON",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The checked command line of ``tilewright serve``.

    ``argv`` contains a configuration file's options.
    """

    argv: tuple[str, ...]
    model: ResolvedConfig
    sampling_defaults: str
    defaults: dict[str, float]
    chat_template: str | None
    tool_format: str | None
    template_variables: dict[str, Any]
    image_limits: ImageLimits
    devices: tuple[int, ...] = ()
    """GPUs of all replicas, if there are several replicas."""
    host: str = option("address to listen on", default="127.0.0.1")
    port: int = option("port to listen on, 0: any free port", default=8000, type=integer(0, 65535))
    detach: bool = option("return after the server is ready, and leave it running", default=False)
    log: Path | None = option(
        "log file for --detach (default: a new temporary file)",
        type=Path,
        metavar="FILE",
    )
    verbose: bool = option("log the notes of the compiler", "-v", "--verbose", default=False)
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
        group="requests",
        metavar="KEY",
    )
    served_model_name: tuple[str, ...] = option(
        "accepted model names. Responses contain the first",
        default=(),
        group="requests",
        metavar="NAME",
    )
    strict_model: bool = option("answer 404 to other model names", default=False, group="requests")
    cors_origins: tuple[str, ...] = option(
        "allowed origins of foreign web pages, '*': all",
        default=(),
        group="requests",
        metavar="ORIGIN",
    )
    max_queue: int = option(
        "maximum waiting requests",
        default=1024,
        group="requests",
        type=integer(1, 1 << 20),
    )
    queue_timeout: float = option(
        "maximum wait in the queue, in seconds",
        default=600.0,
        group="requests",
        type=real(0, 1e6, above=True),
    )
    drain_timeout: float = option(
        "time for running requests at shutdown, in seconds",
        default=30.0,
        group="requests",
        type=real(0, 1e6),
    )
    pooling: str = option(
        "embedding vector: mean over all tokens, or the last token",
        default=MEAN,
        group="requests",
        choices=POOLINGS,
    )
    admin: bool = option("serve /slots and /reset_prefix_cache", default=False, group="requests")
    metrics_names: str = option(
        "prefix for metric names",
        default="tilewright",
        group="requests",
        choices=("tilewright", "vllm"),
    )


def read_serve_options(
    argv: Sequence[str], sign: Sign | None = None, *, last_wins: bool = False
) -> ServeOptions:
    """Read and check the command line of ``tilewright serve``.

    Args:
        argv: arguments after ``serve``.
        sign: shows the first progress line after parsing, before any file is read.
        last_wins: Whether a doubled option is allowed. An engine gets the options of the server,
            then the options of its replica.

    Raises:
        TilewrightError: for every mistake that is visible without the model.
    """
    parser = Parser(
        last_wins=last_wins,
        prog="tilewright serve",
        description="Serve a model over HTTP with the OpenAI API. A request with timings: true "
        "gets llama.cpp's timings, in streams with the end of each choice.",
    )
    kinds = (PathArguments, ConfigArguments, EngineConfig, _ServeArgs, ServeOptions)
    add_options(parser, *kinds, without=("dump",))
    argv = with_config(parser, argv)
    arguments = parser.parse_args(argv)
    config = read_config(arguments)
    if sign is not None:
        sign.opening(config.model)
    given = values_of(ServeOptions, arguments)
    if len(given["api_key"]) > _MAX_KEYS or not all(given["api_key"]):
        raise ConfigError(f"--api-key: allowed: up to {_MAX_KEYS}, none of them empty")
    if config.cache_output and not config.enable_prefix_caching:
        raise ConfigError("--cache-output with --no-enable-prefix-caching; allowed: one of them")
    if arguments.detach and not arguments.port:
        raise ConfigError("--detach with --port 0; allowed: a port that is named")
    devices: tuple[int, ...] = ()
    if given["replicas"] > 1:  # the devices are distributed over the replicas
        devices, config = config.devices or (), replace(config, devices=None)
    return ServeOptions(
        argv=tuple(argv),
        model=resolve(config),
        sampling_defaults=arguments.sampling_defaults,
        defaults=_DEFAULTS[arguments.sampling_defaults],
        chat_template=_template(arguments.chat_template),
        tool_format=arguments.tool_format,
        template_variables=_variables(arguments.default_chat_template_kwargs),
        image_limits=_image_limits(arguments.limit_mm_per_prompt),
        devices=devices,
        **given,
    )


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    from tilewright.models.tokenizer.chat_template import ChatTemplate

    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"--chat-template {path}: {reason}; allowed: a Jinja file") from None
    return ChatTemplate(source, f"--chat-template {path}").source


def _image_limits(text: str) -> ImageLimits:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    count = values.get("image", 4) if isinstance(values, dict) else None
    is_valid = isinstance(values, dict) and values.keys() <= {"image"}
    if not is_valid or type(count) is not int or not 0 <= count <= _MAX_IMAGES:
        said = f"--limit-mm-per-prompt {text[:100]!r}"
        raise ConfigError(f'{said}; allowed: {{"image": N}}, N from 0 to {_MAX_IMAGES}')
    return ImageLimits(max_images=count)


def _variables(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        name = "--default-chat-template-kwargs"
        raise ConfigError(f"{name} {str(text)[:100]!r}; allowed: a JSON object")
    return found
