"""Runs a command on a rank above 0, of torchrun or on a further machine of a group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tilewright.distributed.grouping import Grouping, read_grouping

_SIGNS = ("TILEWRIGHT_RANK", "RANK", "LWS_WORKER_INDEX")


def is_follower(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether rank 0 is another process."""
    is_named = any(each.startswith(("--node-rank", "--config")) for each in argv)
    if not is_named and all(environ.get(name, "0") == "0" for name in _SIGNS):
        return False
    grouping, _ = _read(argv)
    return not (grouping.is_alone or grouping.leads)


def run_follower(argv: Sequence[str]) -> int:
    """Follow rank 0 with this process, or with this machine's ranks; the exit code.

    Raises:
        TilewrightError: where rank 0 is not reached, or the group fails.
    """
    from tilewright.distributed.launch import serve_machine
    from tilewright.distributed.world import shared_token
    from tilewright.loading.follower import main
    from tilewright.loading.ranks import FOLLOW

    grouping, path = _read(argv)
    own = [] if path is None else [path]
    if grouping.place is not None:
        return main(own)
    machines = grouping.machines
    token = shared_token(machines.host, False)
    return serve_machine(machines, grouping.parallel.tensor, [*FOLLOW, *own], token)


def _read(argv: Sequence[str]) -> tuple[Grouping, str | None]:
    """Return the group, and the model's path on this machine if given."""
    from tilewright.options.arguments import Parser, add_options, names_of
    from tilewright.options.config_file import with_config
    from tilewright.options.engine_config import RANKS, EngineConfig

    parser = Parser(prog="tilewright", add_help=False, allow_abbrev=False)
    add_options(parser, EngineConfig, only=("model", *names_of(EngineConfig, RANKS)))
    words = with_config(parser, argv, skips_unknown=True)
    parsed, _ = parser.parse_known_args(words)
    return read_grouping(parsed), parsed.model
