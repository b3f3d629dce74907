"""``tilewright serve`` options, checked before any heavy import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.errors import ConfigError
from tilewright.options.arguments import Parser, add_options, option, values_of
from tilewright.options.config_file import (
    ConfigArguments,
    PathArguments,
    read_config,
    with_config,
)
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve
from tilewright.serve.web.settings import ServerConfig
from tilewright.utils.files import read_text

if TYPE_CHECKING:
    from tilewright.cli.arguments.ask import ModelStatusLine

_MAX_KEYS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The checked command line for ``tilewright serve``.

    ``argv`` contains a configuration file's options.
    """

    argv: tuple[str, ...]
    model: ResolvedConfig
    server: ServerConfig
    devices: tuple[int, ...] = ()
    """GPUs for all replicas, if there are several."""
    detach: bool = option("return after the server is ready, and leave it running", default=False)
    log: Path | None = option(
        "log file for --detach (default: a new temporary file)",
        type=Path,
        metavar="FILE",
    )
    verbose: bool = option("log the compiler notes", "-v", "--verbose", default=False)


def read_serve_options(
    argv: Sequence[str], sign: ModelStatusLine | None = None, *, last_wins: bool = False
) -> ServeOptions:
    """Read and check the command line for ``tilewright serve``.

    Args:
        argv: arguments after ``serve``.
        sign: shows the first progress line after parsing, before any file is read.
        last_wins: Whether a doubled option is allowed. An engine gets the server options, then
            replica options.

    Raises:
        TilewrightError: for every mistake that is visible without the model.
    """
    parser = Parser(
        last_wins=last_wins,
        prog="tilewright serve",
        description="Serve a model over HTTP with the OpenAI API. A request with timings: true "
        "gets llama.cpp's timings, in streams with the end of each choice.",
    )
    kinds = (PathArguments, ConfigArguments, EngineConfig, ServerConfig, ServeOptions)
    add_options(parser, *kinds, without=("dump",))
    argv = with_config(parser, argv)
    arguments = parser.parse_args(argv)
    config = read_config(arguments)
    if sign is not None:
        sign.opening(config.model)
    server = ServerConfig(**values_of(ServerConfig, arguments))
    if len(server.api_key) > _MAX_KEYS or not all(server.api_key):
        raise ConfigError(f"--api-key: allowed: up to {_MAX_KEYS}, none of them empty")
    if config.cache_output and not config.enable_prefix_caching:
        raise ConfigError("--cache-output with --no-enable-prefix-caching; allowed: one of them")
    if arguments.detach and not arguments.port:
        raise ConfigError("--detach with --port 0; allowed: a port that is named")
    devices: tuple[int, ...] = ()
    if server.replicas > 1:  # the devices are distributed over the replicas
        devices, config = config.devices or (), replace(config, devices=None)
    if server.chat_template is not None:
        server = replace(server, chat_template=_template(server.chat_template))
    return ServeOptions(
        argv=tuple(argv),
        model=resolve(config),
        server=server,
        devices=devices,
        **values_of(ServeOptions, arguments),
    )


def _template(path: str) -> str:
    from tilewright.models.tokenizer.chat_template import ChatTemplate

    where = f"--chat-template {path}"
    return ChatTemplate(read_text(Path(path), where, hint="a Jinja file"), where).source
