"""Prompts to text, with speed and accuracy: ``tilewright run`` from a clone."""

import sys

from tilewright.compiler.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
