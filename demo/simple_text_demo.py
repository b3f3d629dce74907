"""Prompts to text, with speed and accuracy: ``tilewright bench`` from a clone."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
