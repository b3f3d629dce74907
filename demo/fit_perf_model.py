"""Fit the performance model of Tenstorrent boards to published speeds, and hold some out."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiler.commands.fit_perf_model import main
from compiler.errors import TilewrightError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TilewrightError as error:
        print(f"fit_perf_model.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
