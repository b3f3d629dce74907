"""Load a server with streams: the command ``tilewright bench-serve``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench-serve", *sys.argv[1:]]))
