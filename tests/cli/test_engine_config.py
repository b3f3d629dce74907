"""A field of `EngineConfig` is a flag, a keyword, a key of a YAML file and a line of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilewright import LLM
from tilewright.cli.arguments.serve import read_serve_options
from tilewright.cli.main import main
from tilewright.errors import ConfigError
from tilewright.options.arguments import declared
from tilewright.options.engine_config import EngineConfig

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
SHAPE = "shape:tiny"
VALUES = {
    "model": SHAPE,
    "target": "null",
    "precision": "bf16",
    "compute": "exact",
    "max_model_len": "64",
    "max_num_batched_tokens": "128",
    "gpu_memory_utilization": "0.5",
    "weight_copies": "none",
    "batch_invariant": "always",
    "num_threads": "2",
    "use_cache": "false",
    "max_num_seqs": "3",
    "max_prefill_ms": "5.5",
    "enable_prefix_caching": "false",
    "cache_output": "false",
    "swap_space": "1.5",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    "tensor_parallel_size": "2",
    "expert_parallel_size": "2",
    "tensor_split": "2,1",
    "comm_dtype": "bf16",
    "rank_timeout": "3.5",
    "master_port": "1234",
}
"""A value of every field, as the text of a flag, that a machine without GPUs accepts."""
ELSEWHERE = {"dump", "backend", "devices", "collective_backend"}
"""Fields that `serve` or target null refuse."""
MACHINES = {"nnodes", "node_rank", "master_addr"}
"""Fields that start other machines."""


def _flags(name: str, text: str) -> list[str]:
    flag = name.replace("_", "-")
    if text in ("true", "false"):
        return [f"--{flag}" if text == "true" else f"--no-{flag}"]
    return [f"--{flag}={text}"]


def test_every_field_is_flag_key_and_line_of_the_docs(tmp_path: Path) -> None:
    fields = declared(EngineConfig)
    assert set(fields) == set(VALUES) | ELSEWHERE | MACHINES
    file = tmp_path / "engine.yaml"
    file.write_text("".join(f"{name}: {text}\n" for name, text in VALUES.items()))
    words = [word for name, text in VALUES.items() for word in _flags(name, text)]
    by_flags = read_serve_options(words).model.config
    assert read_serve_options(["--config", str(file)]).model.config == by_flags
    assert EngineConfig.of({n: getattr(by_flags, n) for n in fields}) == by_flags
    unchanged = {
        name for name in VALUES if getattr(by_flags, name) == getattr(EngineConfig(), name)
    }
    assert unchanged == set()
    lines = DOCS.read_text("utf-8")
    for name, made in fields.items():
        assert f"| `{name}` | {made.text} |" in lines, f"docs/cli.md lacks this line of {name}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_num_seq: 3", "unknown key 'max_num_seq'; .*did you mean 'max_num_seqs'"),
        ("max_num_seqs: 3\nmax_num_seqs: 4", ":2: 'max_num_seqs' is given twice"),
        ("max_num_seqs: 3\nmax_seats: 4", "max_seats: given twice, also as max_num_seqs"),
        ("max_num_seqs: many", "max_num_seqs: 'many'; allowed: auto, or integers, 1 to 4096"),
        ("use_cache: 1", "use_cache: '1'; allowed: true, false"),
        ("weight_copies: some", "weight_copies: .*none"),
        ("- model", "no option map; allowed: lines"),
        ("model:", "model: ''; allowed: a value, or without the key"),
    ],
)
def test_wrong_file_is_an_error_in_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and str(file) in error and error.count("\n") == 1
    if "model" not in text and "\n" not in text:
        with pytest.raises(ConfigError, match=said):
            LLM(SHAPE, config=file)


def test_flag_replaces_the_value_of_the_file_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: {SHAPE}\ntarget: null\nmax_num_seqs: 3\nport: 9\n")
    options = read_serve_options(
        ["--config", str(file), "--max-seats", "4", "--target", "reference"]
    )
    assert (options.model.config.max_num_seqs, options.server.port) == (4, 9)
    assert capsys.readouterr().err.splitlines() == [
        f"tilewright: {file}: target: replaced by the command line",
        f"tilewright: {file}: max_num_seqs: replaced by the command line",
    ]


def test_keyword_out_of_range_or_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq'; .*'max_num_seqs'"):
        LLM(SHAPE, max_num_seq=1)
    with pytest.raises(ConfigError, match="max_num_seqs: '0'; allowed: auto, or integers"):
        LLM(SHAPE, max_num_seqs=0)
    with pytest.raises(ConfigError, match="num_threads: '2'; allowed: numbers"):
        LLM(SHAPE, num_threads="2")
    with pytest.raises(ConfigError, match="max_seats: given twice, also as max_num_seqs"):
        LLM(SHAPE, max_num_seqs=1, max_seats=1)
    assert EngineConfig.of({"arithmetic": "strict", "shares": [2, 1]}) == EngineConfig(
        batch_invariant="always", tensor_split=(2, 1)
    )


def test_removed_variable_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CUDA_TRIALS", "1")
    assert main(["run", "--model", SHAPE, "--target", "null", "--prompt", "x"]) == 2
    said = "tilewright: TILEWRIGHT_CUDA_TRIALS: this switch no longer exists; allowed: unset it\n"
    assert capsys.readouterr().err == said
