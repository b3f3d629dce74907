"""One readable engine.py for a model, the fastest of several: ``tilewright generate-engine``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate-engine", *sys.argv[1:]]))
