"""The speed of the CUDA target with random weights, row by row, beside the device's own limits."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiler.commands.bench_cuda import main
from compiler.errors import TilewrightError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TilewrightError as error:
        print(f"bench_cuda.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
