"""``--emit engine`` of a checkpoint, and ``--emit engine --config``: the search and its log."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Run
from tests.targets.cuda.engine_generator.conftest import CONFIG
from tests.tiny import prefill
from tilewright.cli.commands import generate_engine
from tilewright.cli.commands.generate_engine import SECONDS_VARIABLE, main
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CompileError, ConfigError, TilewrightError
from tilewright.evaluate.measure.engine_check import load_engine, run_check
from tilewright.models import load_model


def test_an_emitted_engine_has_the_logits_of_its_checkpoint(
    run: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "engine"
    said = run("compile", tiny_folder, "--emit", "engine", "-o", out)
    assert "--self-test" in said
    module = load_engine(str(out / "engine.py"))
    config = json.loads((out / "model_config.json").read_text())
    assert config["rope_style"] == "half"
    tokens = [3, 1, 4, 1, 5]
    engine = module.create_engine(config, out / "weights", "cpu")
    ours = engine.prefill([1], [torch.tensor(tokens)])
    compiled = compile_model(
        load_model(tiny_folder),
        load_precision("reference"),
        target="reference",
        options=CompileOptions(max_context=8),
    )
    assert torch.allclose(ours[0], prefill(compiled.executable, tokens)[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ("--precision with --emit engine, which computes in 16 bits", ["--precision", "bf16"]),
        ("target n150 emits no 'engine'; allowed: program, ttnn", ["--target", "n150"]),
    ],
)
def test_engines_take_no_precision_and_are_of_cuda(
    said: str, given: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    from tilewright.cli.commands.compile import main as compile_main

    argv = [str(tiny_folder), "--emit", "engine", "-o", str(tmp_path / "x"), *given]
    with pytest.raises(TilewrightError, match=said):
        compile_main(argv)
    assert not (tmp_path / "x").exists()


Target = tuple[list[str], Path]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """A configuration and its weights: arguments that name them, and the folder that is written."""
    path, place = tmp_path / "model_config.json", tmp_path / "workspace"
    path.write_text(json.dumps(CONFIG))
    weights = random_weights(read_settings(CONFIG, torch.device("cpu")), 0)
    torch.save(weights, tmp_path / "model.pt")
    given = ["--config", str(path), "--weights", str(tmp_path), "--output", str(place)]
    return [*given, "--device", "cpu"], place


_PLANS: dict[str, Any] = {}
"""Those of the configuration: made once."""

Trials = Callable[[dict[str, Any]], None]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    """Candidates are tried in this process, and then said to be what ``change`` makes of it."""

    def install(change: dict[str, Any]) -> None:
        count = 0

        def attempt(search: Any, trial: Any, least: float = 0.0) -> dict[str, Any] | str:
            nonlocal count
            found = run_check(trial)
            changed = change.get(str(count))
            count += 1
            if isinstance(changed, str):
                return changed
            for each in found["cases"].values() if changed else ():
                each.update(changed)
            return found

        monkeypatch.setattr(generate_engine._EngineSearch, "_try", attempt)

    def plans(search: Any) -> dict[str, Any]:
        if not _PLANS:
            _PLANS.update(made(search))
        search._settings()
        search.num_layers = CONFIG["num_hidden_layers"]
        return _PLANS

    made = generate_engine._EngineSearch._plans
    monkeypatch.setattr(generate_engine._EngineSearch, "_plans", plans)
    monkeypatch.setattr(generate_engine, "_SHORTER", 16)
    install({})
    return install


def test_the_fastest_correct_engine_is_kept(target: Target, trials: Trials) -> None:
    argv, place = target
    trials({"0": {"median_s": 1.0}, "1": {"median_s": 0.5}, "2": {"median_s": 0.25}})
    assert main(argv) == 0
    log = (place / "results.log").read_text()
    assert "norms inside products: 2.00 times the reference, error 0.000 of the tolerance" in log
    assert "kept: norms apart, 4.00 times the reference" in log
    text = (place / "engine.py").read_text()
    assert "norms apart" in text and "Norm(out=" in text


def test_wrong_and_failing_candidates_are_passed_over(target: Target, trials: Trials) -> None:
    argv, place = target
    trials({"1": {"error": 1.5, "median_s": 1e-9}})
    assert main(argv) == 0
    log = (place / "results.log").read_text()
    assert "norms inside products: wrong: 1.50 times the tolerance" in log
    assert "kept: norms apart" in log
    trials({"1": "SIGKILL: out of memory", "2": {"error": float("inf")}})
    with pytest.raises(CompileError, match="no candidate was correct"):
        main(argv)
    assert "failed: SIGKILL: out of memory" in (place / "results.log").read_text()


def test_the_best_so_far_is_kept_when_the_time_is_up(
    target: Target, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, place = target
    monkeypatch.setenv(SECONDS_VARIABLE, "0.001")
    assert main(argv) == 0
    log = (place / "results.log").read_text()
    assert "the time is up" in log and "kept: norms inside products" in log


def test_bad_targets_are_refused_in_one_line(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, place = target
    path = tmp_path / "model_config.json"
    for text, said in (
        ("{", "Expecting property name"),
        ("[]", "allowed: a mapping of keys"),
        (json.dumps({**CONFIG, "num_attention_heads": None}), "no 'num_attention_heads'"),
        (json.dumps({**CONFIG, "vocab_size": 97}), r"of shape \[96, 64\]; expected: \[97, 64\]"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said) as refused:
            main(argv)
        assert f"stopped: {refused.value}\n" in (place / "results.log").read_text()
    path.write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=r"^\S*/workspace: no weights; allowed: model.pt"):
        main([*argv[:3], str(place), *argv[4:]])
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        main(argv)
    assert not (place / "engine.py").exists()
    with pytest.raises(ConfigError, match=r"--seconds 0.0; allowed: a number of seconds above 0"):
        main([*argv, "--seconds", "0"])
    monkeypatch.setenv(SECONDS_VARIABLE, "soon")
    with pytest.raises(ConfigError, match=r"TILEWRIGHT_GENERATE_S 'soon'; allowed"):
        main(argv)


def test_made_up_weights_are_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).resolve().parents[2] / "demo/engine_generator/scripts"
    path, made = tmp_path / "model_config.json", tmp_path / "weights" / "model.pt"

    def ran(output: Path) -> tuple[Any, str]:
        argv = ["generate_toy_weights.py", "--config", str(path), "--output", str(output)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script / argv[0]), run_name="__main__")
        return ended.value.code, capsys.readouterr().err

    path.write_text(json.dumps({**CONFIG, "vocab_size": 0}))
    said = f"{path}: model_config: vocab_size 0; allowed: a whole number, 1 or more\n"
    assert ran(made) == (2, said) and not made.exists()
    path.write_text(json.dumps(CONFIG))
    assert ran(made) == (0, "") and [*made.parent.iterdir()] == [made]
    settings = read_settings(CONFIG, torch.device("cpu"))
    state = torch.load(made, weights_only=True)
    assert (
        state.keys() == settings.shapes().keys() == load_weights(str(made.parent), settings).keys()
    )
    torch.save({f"model.{name}": each for name, each in state.items()}, made)
    assert load_weights(str(made.parent), settings).keys() == settings.shapes().keys()
    code, error = ran(path / "model.pt")
    assert code == 2 and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.quiet
def test_run_sh_writes_an_engine_in_time(tmp_path: Path) -> None:
    """The demo as an evaluator runs it: on two quiet cores, under a minute."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHON": sys.executable, "WORKSPACE": str(tmp_path)}
    begun = time.monotonic()
    subprocess.run(["bash", root / "demo/engine_generator/run.sh"], check=True, env=environment)
    assert (tmp_path / "engine.py").is_file() and (tmp_path / "results.log").is_file()
    assert time.monotonic() - begun < 60
