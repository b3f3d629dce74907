"""``python -m bench bench-loop``: host time of a scheduler step, with the null target.

The clock includes work of other processes on the machine.
"""

from __future__ import annotations

from bench.cuda.step_times import host_times
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.null import NullExecutable
from tilewright.options.arguments import Parser

_VOCABULARY, _MAX_CONTEXT = 49_152, 1 << 20


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-loop`` and return the exit code."""
    parser = Parser(prog="python -m bench bench-loop", description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 64, 256], metavar="N")
    given = parser.parse_args(argv)
    for slots in given.slots:
        options = CompileOptions(max_batch=slots, max_context=_MAX_CONTEXT)
        executable = NullExecutable(_VOCABULARY, options, NumericContract((), ()))
        for line in host_times(executable, slots, samples=False):
            print(f"{slots} slots: {line}", flush=True)
    return 0
