"""A model for dllama, or into the compiled cache: ``tilewright convert`` from a clone."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
