"""Fit the performance model of Tenstorrent boards to published speeds, and hold some out."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["fit-perf-model", *sys.argv[1:]]))
