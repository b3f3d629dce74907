"""Serve a model over HTTP, as OpenAI's API does: the command ``tilewright serve``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
