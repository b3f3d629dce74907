"""First calls and memory of an emitted engine on a single GPU.

``PYTHONPATH=. python3 -m bench.engine.first_calls`` writes an engine and random weights. A spawned
process for each case loads the file by its path, without a name in ``sys.modules``. It prints:

- the first call, the tenth call and the median. The first may differ from the tenth by 10 %. All
  calls follow the same work: new tokens, then an idle GPU. Other work cools the processor's caches.
- the time until the last call returns, while the GPU still computes.
- calls with the same tokens without other work, and calls after a pause. They have no limit.
- the first measurement without an engine: the time for the measurement's own code.
- memory without the context: weights, mapped memory and the rest. The rest may have 200 MB.
- growth: pointers and graphs above 4,096 positions, and memory after the engine.

The exit code is 1 if a limit is missed. ``--engine FILE`` measures another engine.py.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import PLAN
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
from tilewright.evaluate.measure.engine_calls import EngineTrace, cases

LIMIT_MB, LIMIT_SHARE = 200.0, 0.1
MODEL: dict[str, Any] = {
    **{"model_type": "tiny_llama", "torch_dtype": "float16", "vocab_size": 4096},
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 192},
    **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
}
"""Configuration of the model with speed goals."""


def load(path: str) -> Any:
    """Load a file by its path."""
    spec = importlib.util.spec_from_file_location("evaluated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def used_mb() -> float:
    """Return the GPU memory in use by all processes, in MB."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 1e6


def mapped_mb(engine: Any) -> float:
    """Return the memory at reserved addresses, in MB."""
    executor = engine._executor
    tensors = (*executor.pages._tensors, *executor._slots._tensors)
    return sum(sum(addresses._parts) for _, addresses in tensors) / 1e6


class _NoEngine:
    """Calls without work. They warm the measurement's own code."""

    def prefill(self, *arguments: Any) -> None:
        return

    decode = remove = prefill


def measure_case(options: dict[str, Any], case: str, results: Any) -> None:
    """Measure a case in a fresh process. Put the result into a queue."""
    torch.zeros(1, device="cuda")
    begin = used_mb()
    module = load(options["engine"])
    begun = time.perf_counter()
    engine = module.create_engine(options["config"], options["weights"], "cuda")
    facts: dict[str, Any] = {"create_s": time.perf_counter() - begun, "created": used_mb() - begin}
    facts["graphs"] = len(engine._executor._graphs)
    facts["mapped"] = mapped_mb(engine)
    facts |= {"ms": [], "returned": [], "repeated": [], "paused": []}
    facts["without engine"] = []

    def measure(trace: EngineTrace, name: str, engine: Any = engine) -> None:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        trace.run(engine)
        returned = time.perf_counter() - begun
        torch.cuda.synchronize()
        facts[name].append(1e3 * (time.perf_counter() - begun))
        if name == "ms":
            facts["returned"].append(1e3 * returned)
        engine.remove(trace.requests)

    def new_trace() -> EngineTrace:
        return EngineTrace(cases()[case], options["config"]["vocab_size"], options["tokens"])

    measure(new_trace(), "without engine", _NoEngine())  # this process's first measurement
    for _ in range(options["repeats"]):
        measure(trace := new_trace(), "ms")
    for _ in range(options["repeats"]):
        measure(trace, "repeated")
    for _ in range(5):
        trace = new_trace()
        time.sleep(options["pause"])
        measure(trace, "paused")
    facts["used"], facts["reserved"] = used_mb() - begin, torch.cuda.memory_reserved() / 1e6
    facts["new_graphs"] = len(engine._executor._graphs) - facts["graphs"]
    results.put(facts)


def measure_growth(given: dict[str, Any], results: Any) -> None:
    """Measure prompts above the first memory, and several engines. Put facts into a queue."""
    torch.zeros(1, device="cuda")
    module, config, device = load(given["engine"]), given["config"], torch.device("cuda", 0)
    engine = module.create_engine(config, given["weights"], "cuda")
    executor = engine._executor
    graphs, mapped = len(executor._graphs), [mapped_mb(engine)]
    places = executor.pages.base.data_ptr(), executor._table.data_ptr()
    length, vocab = min(1024, config["max_position_embeddings"] - 8), config["vocab_size"]
    prompts, ids = [torch.randint(0, vocab, (length,)) for _ in range(40)], list(range(40))
    begun = time.perf_counter()
    engine.prefill(ids, prompts)
    torch.cuda.synchronize()
    facts: dict[str, Any] = {"prefill of 40 x 1,024 that maps (s)": time.perf_counter() - begun}
    mapped.append(mapped_mb(engine))
    rows = [engine.decode(ids, torch.arange(40)) for _ in range(4)]
    mapped.append(mapped_mb(engine))
    alone = module.create_engine(config, given["weights"], "cuda")
    alone.prefill([7], [prompts[7]])
    expected = [alone.decode([7], torch.tensor([7])) for _ in range(4)]
    errors = [module.error_of(a[7:8], b) for a, b in zip(rows, expected, strict=True)]
    same = places == (executor.pages.base.data_ptr(), executor._table.data_ptr())
    engine.remove(ids)
    mapped.append(mapped_mb(engine))
    facts |= {"mapped (MB): first, grown, decoded, removed": mapped, "pointers stay": same}
    facts["new graphs"] = len(executor._graphs) - graphs
    facts["error beside a small engine, of the tolerance"] = max(errors)
    settings = module.read_settings(config, device)
    tensors = module.load_weights(given["weights"], settings)
    reference = module.Reference(tensors, settings, device)
    found = module.compare(alone, reference, settings, seed=0, operations=given["operations"])
    facts["random calls, worst error of the tolerance"] = found[0]
    del engine, executor, alone, rows, expected, reference, tensors
    used = []
    for _ in range(given["engines"]):
        module.create_engine(config, given["weights"], "cuda").remove([])
        gc.collect()
        torch.cuda.empty_cache()
        used.append(used_mb())
    facts["memory after engines (MB, less the first's)"] = [round(u - used[0], 2) for u in used]
    good = same and not facts["new graphs"] and mapped[0] == mapped[3] and mapped[1] == mapped[2]
    results.put({"facts": facts, "good": bool(good and max(*errors, found[0]) <= 1)})


def in_child(function: Any, *given: Any) -> dict[str, Any]:
    """Run a function in a spawned process. Return the item in its queue."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=function, args=(*given, results))
    child.start()
    while child.is_alive() and results.empty():
        time.sleep(0.05)
    found = None if results.empty() else results.get()
    child.join()
    if found is None:
        raise SystemExit(f"{function.__name__}: the process ended with {child.exitcode}")
    return dict(found)


def report(case: str, found: dict[str, Any], weights: float) -> bool:
    """Print the lines of a case. Return whether its limits hold."""
    first, tenth = found["ms"][0], found["ms"][9]
    share, rest = first / tenth - 1, found["used"] - weights - found["mapped"]
    good = abs(share) <= LIMIT_SHARE and rest <= LIMIT_MB and not found["new_graphs"]
    print(
        f"{case}: first {first:.3f} ms, tenth {tenth:.3f} ({100 * share:+.1f} %), median "
        f"{statistics.median(found['ms']):.3f}; created in {found['create_s']:.1f} s; memory "
        f"{found['used']:.0f} MB ({found['created']:.0f} created) = weights {weights:.0f} + mapped "
        f"{found['mapped']:.0f} + {rest:.0f} (limit {LIMIT_MB:.0f}); torch reserved "
        f"{found['reserved']:.0f}; {found['graphs']} graphs, {found['new_graphs']} captured later: "
        f"{'good' if good else 'MISSED'}",
        flush=True,
    )
    for name in ("ms", "returned", "repeated", "paused", "without engine"):
        print(f"  {name}: " + " ".join(f"{each:.3f}" for each in found[name]))
    return good


def main(argv: list[str] | None = None) -> int:
    """Measure all cases and the growth. Return 1 after a missed limit."""
    parser = argparse.ArgumentParser(description="First calls and memory of an emitted engine.")
    option = parser.add_argument
    option("--engine", help="path of an engine.py (default: write an engine)")
    option("--config", help="path of a model_config.json (default: 12 layers of 768)")
    option("--products", default="triton", choices=("triton", "cuda"))
    option("--tokens", default="cuda", choices=("cuda", "cpu"), help="device of the tokens")
    option("--repeats", type=int, default=20, help="calls per case, at least 10")
    option("--pause", type=float, default=0.2, help="seconds before a paused call")
    option("--operations", type=int, default=60, help="number of compared random calls")
    option("--engines", type=int, default=5, help="number of engines for the memory")
    given = parser.parse_args(argv)
    config = json.loads(Path(given.config).read_text("utf-8")) if given.config else MODEL
    with tempfile.TemporaryDirectory() as folder:
        tensors = random_weights(read_settings(config, torch.device("cpu")), 0)
        torch.save(tensors, Path(folder) / "model.pt")
        weights = sum(each.numel() for each in tensors.values()) * 2 / 1e6
        path = Path(given.engine or Path(folder) / "engine.py")
        if not given.engine:
            layers, choices = config["num_hidden_layers"], Choices(products=given.products)
            path.write_text(engine_text(PLAN, choices, title="a check", num_layers=layers), "utf-8")
        inputs = {**vars(given), "engine": str(path.resolve()), "config": config, "weights": folder}
        good = [report(case, in_child(measure_case, inputs, case), weights) for case in cases()]
        growth = in_child(measure_growth, inputs)
        for name, fact in growth["facts"].items():
            print(f"{name}: {fact}")
        good.append(growth["good"])
    print("all limits are kept" if all(good) else "a limit is MISSED")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
