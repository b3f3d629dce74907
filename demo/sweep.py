"""Find the precision a model deserves, by measuring: the command ``tilewright sweep``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
