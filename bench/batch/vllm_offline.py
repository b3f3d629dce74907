"""vLLM's offline engine on a data set of ``make-batch --token-ids``: the same rows and lengths.

``python vllm_offline.py FOLDER ROWS.jsonl``: FOLDER has a ``config.json``; its weights are random,
and ``--quantization fp8`` quantises them as they are made. Rows are given in the file's order, or
with ``--orders longest`` in that in which ``tilewright batch`` takes them; one engine may answer
them in several orders, one behind the other. Runs where vLLM is installed; imports nothing of
Tilewright's. Prints a line of JSON for each order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ORDERS = "file", "longest"


def main(argv: list[str]) -> int:
    """Generate every row to its own length, in every order; prints what each took."""
    parser = argparse.ArgumentParser(description="Time vLLM's offline engine on a data set.")
    parser.add_argument("folder")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--quantization")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["file"])
    options = parser.parse_args(argv)
    # without flashinfer, with which it draws tokens, vLLM ends with a ModuleNotFoundError; here
    # every token is the likeliest
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    rows = [json.loads(line)["body"] for line in options.rows.read_text().splitlines()]
    began = time.perf_counter()
    engine = LLM(
        model=options.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization=options.quantization,
        max_model_len=4096,
        max_num_seqs=options.seats,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.9,
    )
    print(f"started in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    answer(engine, rows[:2])
    longest = sorted(rows, key=lambda row: -row["max_tokens"])
    prompts = sum(len(row["prompt"]) for row in rows)
    count = sum(row["max_tokens"] for row in rows)
    for order in options.orders:
        seconds = answer(engine, longest if order == "longest" else rows)
        found = {"engine": "vLLM", "rows": len(rows), "seats": options.seats, "seconds": seconds}
        rates = {"order": order, "prompt_tokens": prompts, "output_tokens": count}
        print(
            json.dumps({**found, **rates, "output_tokens_per_second": count / seconds}), flush=True
        )
    return 0


def answer(engine: Any, rows: Sequence[dict[str, Any]]) -> float:
    """Seconds in which an engine answers rows, each to its own length."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": row["prompt"]} for row in rows]
    params = [
        SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=row["max_tokens"], detokenize=False
        )
        for row in rows
    ]
    began = time.perf_counter()
    outputs = engine.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = [len(each.outputs[0].token_ids) for each in outputs]
    assert counts == [row["max_tokens"] for row in rows], "an answer ended early"
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
