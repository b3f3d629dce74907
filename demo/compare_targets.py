"""Targets beside each other and the fp32 reference, position by position over thousands."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiler.commands.compare_targets import script

if __name__ == "__main__":
    sys.exit(script(sys.argv[1:]))
