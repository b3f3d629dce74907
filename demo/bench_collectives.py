"""How long exchanges between two GPUs take: ours beside NCCL's and torch's, in one run."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench-collectives", *sys.argv[1:]]))
