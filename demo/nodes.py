"""Run a model over CPU nodes, as distributed-llama is run: the command ``tilewright nodes``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["nodes", *sys.argv[1:]]))
