"""A data set for `tilewright batch`, of the lengths and scripts of ASC24's, with its histogram."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["make-batch", *sys.argv[1:]]))
