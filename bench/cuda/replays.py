"""How long what a graph captures takes: a median of replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def replayed(run: Callable[[], object], *, count: int = 1, num_replays: int = 9) -> float:
    """Microseconds of one of the ``count`` alike that ``run`` launches: the median of replays of
    its graph, behind a first one.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    found = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(found)
