"""Measurements for maintainers: ``python -m bench NAME`` in a clone of the repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # `python path/to/bench NAME` runs it from any directory
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(each for each in sys.path if each != str(_HERE))]

from tilewright.cli.main import EXIT_USER_ERROR, find_command, report_errors, usage
from tilewright.utils.garbage import run_process

COMMANDS = {
    "perf": ("bench.perf", "render PERF.md from results"),
    "perf-check": ("bench.perf_check", "measure the rows of PERF.md again"),
    "kernels": ("bench.kernels", "kernels of the CUDA target"),
    "reference": ("bench.reference", "write the fp32 reference file of a model"),
    "compare": ("bench.baselines.compare", "CPU target and other engines"),
    "compare-answers": ("bench.baselines.answers", "ten answers, also from llama.cpp"),
    "compare-serve": ("bench.serving.command", "servers, by default ours and llama.cpp's"),
    "compare-calibrated": ("bench.calibration", "calibrated weights and round to nearest"),
    "compare-drafts": ("bench.speculative", "decode speed with n-gram drafts and without"),
    "make-batch": ("bench.make_batch", "write a data set for tilewright batch"),
    "random-files": ("bench.random_files", "write a quantized shape with random codes"),
    "bench-loop": ("bench.host_time", "host time of a scheduler step"),
    "bench-cuda": ("bench.cuda.command", "CUDA target with random weights"),
    "images": ("bench.cuda.images", "images in prompts with random weights"),
    "speculative": ("bench.cuda.drafts", "drafts on the CUDA target with random weights"),
    "fit-perf-model": ("bench.boards_fit.command", "fit the time model of boards"),
}
"""Module and summary of each command."""


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench NAME ...`` and return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage("python -m bench NAME", COMMANDS))
        return 0 if argv else EXIT_USER_ERROR
    name, *rest = argv
    return report_errors(lambda: find_command(name, COMMANDS)(rest))


if __name__ == "__main__":
    sys.exit(run_process(lambda: main(sys.argv[1:])))
