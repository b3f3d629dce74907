"""Tilewright beside llama.cpp, ONNX Runtime GenAI and OpenVINO: ``tilewright compare``."""

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
