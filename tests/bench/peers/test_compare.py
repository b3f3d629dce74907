"""``bench compare``: bad arguments, missing peers, our own worker, peers where installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.peers import PEERS
from bench.peers.command import line_up
from bench.peers.onnx_folder import cached_onnx_folder, write_hf_folder
from bench.peers.options import KINDS, PARTS, CompareOptions, read_options
from bench.peers.records import read_parts
from tests.cli.conftest import Refused
from tilewright.models import ShapeName, load_model
from tilewright.models.shapes import shape_config

SHORT = (
    *("--rounds", "2", "--prefill", "8", "--context", "8", "--decode-tokens", "4"),
    *("--users", "2", "--backends", "onnxruntime"),
)


def one_part(*argv: str) -> CompareOptions:
    (options,) = read_options(argv)
    return options


@pytest.mark.parametrize(
    "argv, said",
    [
        (("--pairs", "all-bfp8"), "'all-bfp8'"),
        (("--pairs", "all-bfp8=Q3_K"), "all-bfp8=Q3_K"),
        (("--pairs", "=Q8_0"), "'=Q8_0'"),
        (("--pairs", "no-such=Q8_0"), "no-such"),
        (("--pairs",), "--pairs"),
        (("--peers", "vllm"), "'vllm'"),
        (("--threads", "0"), "--threads"),
        (("--rounds", "0"), "--rounds"),
        (("--prefill", "0"), "--prefill"),
        (("--prefill", "many"), "--prefill"),
        (("--context", "-1"), "--context"),
        (("--decode-tokens", "2"), "--decode-tokens"),
        (("--timeout", "0"), "--timeout"),
        (("--minutes", "0"), "--minutes"),
        (("--busy", "0"), "--busy"),
        (("--parts", "small"), "'small'"),
        (("--timeout", "nan"), "--timeout"),
        (("--model", "no/such/model.gguf"), "no/such/model.gguf"),
        (("--onnx-genai-folder", "."), "genai_config.json"),
        (("--json", "/"), "folder"),
        (("--unknown",), "--unknown"),
        (("word",), "word"),
    ],
)
def test_bad_arguments_are_refused(
    refused: Refused, tiny_gguf: Path, argv: tuple[str, ...], said: str
) -> None:
    sound = {"--pairs": "all-bfp8=Q8_0", "--model": str(tiny_gguf)}
    usual = [word for pair in sound.items() if pair[0] not in argv for word in pair]
    assert said in refused(*usual, *argv, verb="compare")


def test_what_a_pair_may_be_is_listed(refused: Refused) -> None:
    said = refused("--pairs", "all-bfp8:Q8_0", verb="compare")
    assert all(kind in said for kind in KINDS)


def test_a_context_that_the_model_has_not_is_refused(refused: Refused, tiny_gguf: Path) -> None:
    argv = ("--model", str(tiny_gguf), "--pairs", "all-bfp8=Q8_0", "--prefill", "100000")
    assert "1536" in refused(*argv, verb="compare")


def test_ours_come_before_their_peers_and_none_twice(tiny_gguf: Path) -> None:
    pairs = ("all-bfp8=Q8_0", "all-bfp4=q4_0", "bf16=BF16", "accuracy=Q8_0", "all-bfp8=Q8_0")
    one = ["--model", str(tiny_gguf), "--backends", "onnxruntime", "--pairs"]
    options = one_part(*one, *pairs)
    contestants, versus = line_up(load_model(tiny_gguf), options)
    assert [each.name for each in contestants] == [
        "tilewright all-bfp8",
        "llama.cpp Q8_0",
        "openvino Q8_0",
        "tilewright all-bfp4",
        "llama.cpp Q4_0",
        "onnx-genai int4",
        "openvino Q4_0",
        "tilewright bf16",
        "llama.cpp BF16",
        "tilewright accuracy",
    ]
    assert ("accuracy", "Q8_0") in [(ours.weights, peer.weights) for ours, peer in versus]
    alone = one_part(*one, "bf16=BF16", "--peers")
    contestants, versus = line_up(load_model(tiny_gguf), alone)
    assert [each.name for each in contestants] == ["tilewright bf16"] and versus == []


def test_parts_are_what_is_measured_where_nothing_else_is_said(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run makes the whole record; an option of the command line holds for every part."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    model = ("--model", str(tiny_gguf))
    found = {each.part: each for each in read_options([*model, "--parts", *PARTS])}
    assert list(found) == ["formats", "large", "busy"] and one_part(*model).part == "formats"
    names = [measure.name for measure in found["formats"].plan.measures]
    assert names == ["prefill-512", "decode-128-x8", "decode-128-x32", "decode-128"]
    assert [measure.num_tokens for measure in found["formats"].plan.measures] == [1, 32, 32, 128]
    assert {each.plan.num_rounds for each in found.values()} == {7}
    assert PARTS["large"].model == "shape:llama-3.2-1b" and len(found["large"].pairs) == 2
    busy = found["busy"]
    assert busy.backends == ("onnxruntime", "native") and busy.peers == ("llama.cpp",)
    assert [measure.num_busy for measure in busy.plan.measures] == [0, 1, 2]
    fewer = ("--rounds", "2", "--minutes", "1", "--users")
    shorter = read_options([*model, "--parts", *PARTS, *fewer])
    assert {each.plan.max_seconds for each in shorter} == {60.0}
    assert {(each.plan.num_rounds, each.plan.users) for each in shorter} == {(2, ())}


@pytest.fixture
def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.ceilings.read_bandwidth", lambda num_threads: 1e9)
    find, modules = importlib.util.find_spec, {peer.module for peer in PEERS.values()}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in modules else find(name)
    )


@pytest.mark.usefixtures("without_peers")
def test_missing_peers_are_said_and_ours_is_measured(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "compare.json"
    model = ("--model", str(tiny_gguf), "--pairs", "all-bfp4=Q4_0", "--threads", "1")
    assert main(["compare", *model, *SHORT, "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    for peer in PEERS.values():
        assert f"not installed: pip install {peer.package}" in printed
    words = " ".join(printed.split())  # the console breaks lines
    assert "1 threads of" in words and "Memory read rates are `1.0 to" in words
    assert "Traceback" not in printed
    (record,) = read_parts(output).values()
    ours, *peers = record["contestants"]
    assert ours["failure"] is None and ours["step_bytes"] > 0 and ours["bandwidth_share"] > 0
    assert {name: len(rate["repeats"]) for name, rate in ours["rates"].items()} == {
        "prefill-8": 2,
        "decode-8-x2": 2,
        "decode-8": 2,
    }
    assert len(peers) == 3 and not any(peer["rates"] for peer in peers)
    assert record["ratios"] == [] and len(record["bandwidth"]["readings"]) == 3
    assert record["versions"]["python"] and record["num_threads"] == 1


@pytest.mark.usefixtures("without_peers")
def test_a_part_takes_its_own_place_in_the_file(
    tiny_gguf: Path, tmp_path: Path, refused: Refused
) -> None:
    output = tmp_path / "compare.json"
    argv = ("--model", str(tiny_gguf), "--pairs", "all-bfp4=Q4_0", "--peers", *SHORT)
    for text in ("{", "[1]", '{"schema": 1, "model": "M"}'):
        output.write_text(text)
        assert str(output) in refused(*argv, "--json", str(output), verb="compare")
        assert output.read_text() == text
    output.write_text(json.dumps({"schema": 2, "parts": {"formats": 1, "large": 2}}))
    unmeasured = ("--timeout", "0.01")  # another test has the values of a part
    short = [*argv[: argv.index("--rounds")], "--rounds", "1", *argv[argv.index("--rounds") + 2 :]]
    assert main(["compare", *short, *unmeasured, "--json", str(output)]) == 1
    parts = read_parts(output)
    assert parts["large"] == 2 and parts["formats"]["num_rounds"] == 1


@pytest.mark.usefixtures("without_peers")
def test_a_failure_of_ours_is_the_exit_code(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--model", str(tiny_gguf), "--pairs", "all-bfp4=Q4_0", "--peers", "--timeout", "0.01")
    assert main(["compare", *argv, *SHORT]) == 1
    assert "tilewright all-bfp4: no answer within 0.01 s; killed" in capsys.readouterr().out


def test_a_folder_says_that_gguf_is_needed(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.Peer.missing", lambda peer: None)
    argv = ("--model", str(tiny_folder), "--pairs", "bf16=BF16", "--peers", "llama.cpp")
    options = one_part(*argv)
    contestants, _ = line_up(load_model(tiny_folder), options)
    with pytest.raises(Exception, match=r"no GGUF file: convert it"):
        contestants[-1].start()


def test_a_shape_is_written_once_as_gguf(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the shape's sizes, with a vocabulary that text can be read with."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    first = one_part("--model", "shape:tiny")
    assert one_part("--model", "shape:tiny") == first and first.shape == "shape:tiny"
    model, shape = load_model(Path(first.model)), shape_config(ShapeName("tiny"))
    for size in ("vocab_size", "hidden_size", "num_layers", "num_kv_heads", "head_dim"):
        assert getattr(model.config, size) == getattr(shape, size)
    assert model.tokenizer.decode(model.tokenizer.encode("the hé")) == "the hé"
    values = model.checkpoint.get("model.layers.1.mlp.down_proj.weight").float()
    assert values.std() * values.shape[1] ** 0.5 == pytest.approx(1.0, rel=0.1)
    said = refused("--model", "shape:qwen3-8b", verb="compare")
    assert "qwen3 is not written as GGUF; allowed: a Llama" in said


def test_a_gguf_file_becomes_a_folder_of_the_same_model(tiny_gguf: Path, tmp_path: Path) -> None:
    model = load_model(tiny_gguf)
    write_hf_folder(model, tmp_path / "folder")
    again = load_model(tmp_path / "folder")
    assert dataclasses.replace(again.config, name=model.config.name) == model.config
    assert again.tokenizer.encode("some text") == model.tokenizer.encode("some text")
    assert set(again.checkpoint.names) == set(model.checkpoint.names)
    for name in model.checkpoint.names:
        assert torch.equal(again.checkpoint.get(name), model.checkpoint.get(name).float())


def test_the_onnx_folder_is_built_once(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(source: Path, destination: Path, *, scratch: Path) -> None:
        assert (source / "config.json").is_file()
        destination.mkdir()
        (destination / "genai_config.json").write_text("{}")
        built.append(destination)

    monkeypatch.setattr("bench.peers.onnx_folder.build", build)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1")
    model, folder = load_model(tiny_gguf), tmp_path / "cache"
    first = cached_onnx_folder(model, tiny_gguf, content_hash="a", folder=folder)
    assert cached_onnx_folder(model, tiny_gguf, content_hash="a", folder=folder) == first
    other = cached_onnx_folder(model, tiny_gguf, content_hash="b", folder=folder)
    assert len(built) == 2 and set(folder.iterdir()) == {first, other}


@pytest.mark.parametrize(
    "engine",
    [
        "llama.cpp",
        "openvino",
        pytest.param("onnx-genai", marks=pytest.mark.slow),
    ],
)
def test_a_peer_agrees_with_ours(engine: str, smollm2_path: Path) -> None:
    missing = PEERS[engine].missing()
    if missing is not None:
        pytest.skip(f"{engine}: {missing}")
    one = ("--backends", "onnxruntime", "--users", "3")
    argv = ("--model", str(smollm2_path), "--pairs", "all-bfp4=Q4_0", "--peers", engine, *one)
    options = one_part(*argv)
    model = load_model(smollm2_path)
    contestants, _ = line_up(model, options)
    worker = contestants[1].start()
    try:
        assert worker.loaded().weight_bytes > 60e6
        prompt = model.tokenizer.encode("red, green, blue, " * 5 + "red,")
        first = worker.generate(prompt, 3)
        assert model.tokenizer.decode(first.tokens) == " green, blue"
        assert list(first.times) == sorted(first.times) and first.times[0] > 0
        assert worker.generate(prompt, 3).tokens == first.tokens, "the state starts empty"
        if PEERS[engine].serves_many:
            assert worker.generate(prompt, 3, num_users=3).tokens == first.tokens
    finally:
        worker.close()
