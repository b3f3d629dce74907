"""The fastest of several engine.py files: ``tilewright compile --emit engine``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compile", "--emit", "engine", *sys.argv[1:]]))
