"""``tilewright pull``: a model's files from the Hugging Face hub into its local cache."""

from __future__ import annotations

import sys

from tilewright.errors import CheckpointError
from tilewright.options.arguments import Parser

_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Run ``tilewright pull`` and return the exit code."""
    parser = Parser(
        prog="tilewright pull",
        description="Download a model from the Hugging Face hub. A second run continues.",
    )
    form = "OWNER/NAME[@REVISION][:FILE.gguf]"
    parser.add_argument("name", nargs="?", default="", metavar=form, help="the repository")
    name = parser.parse_args(argv).name
    from tilewright.models import check_header
    from tilewright.models.hub import FORM, fetch, parse_hub_name

    parsed = parse_hub_name(name)
    if parsed is None:
        raise CheckpointError(f"pull {name[:100]!r}: not a name of the hub; allowed: {FORM}")
    print(f"pulling {parsed}", file=sys.stderr)
    try:
        path = fetch(parsed)
    except KeyboardInterrupt:
        print(
            f"tilewright: pull {parsed}: interrupted; the same command continues", file=sys.stderr
        )
        return _INTERRUPTED
    check_header(path)
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    num_bytes = sum(each.stat().st_size for each in files)
    print(f"{parsed}: {num_bytes / 1e6:,.1f} MB; run it: tilewright run {parsed}")
    return 0
