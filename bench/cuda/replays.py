"""How long what a graph captures takes: what the scripts share that measure kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from tilewright.errors import TilewrightError

_WARM_UP, _NUM_REPLAYS = 2, 9


def need_gpu() -> None:
    """Refuse where there is no GPU; raises TilewrightError."""
    import torch

    if not torch.cuda.is_available():
        raise TilewrightError("no GPU: nothing is measured")


def replayed(
    run: Callable[[int], object],
    chain: Sequence[int] = (0,),
    *,
    num_replays: int = _NUM_REPLAYS,
) -> float:
    """Microseconds of one ``run(index)`` of a captured chain of these indices, which runs once
    before, uncaptured: the median of the graph's replays.
    """
    import torch

    run(chain[0])
    torch.cuda.synchronize()
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in chain:
                run(index)
        for _ in range(_WARM_UP):
            graph.replay()
        for _ in range(num_replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / len(chain))
    return statistics.median(found)
