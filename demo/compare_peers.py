"""Tilewright beside llama.cpp, ONNX Runtime GenAI and OpenVINO: ``tilewright compare``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiler.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
