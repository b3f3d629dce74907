"""Prompts to text, with speed and accuracy: ``tilewright run`` from a clone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiler.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
