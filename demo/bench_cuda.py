"""The speed of the CUDA target with random weights, row by row, beside the device's own limits."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench-cuda", *sys.argv[1:]]))
