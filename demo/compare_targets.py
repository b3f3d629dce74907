"""Targets beside each other and the fp32 reference, position by position over thousands."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare-targets", *sys.argv[1:]]))
