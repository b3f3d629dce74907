"""Configurations and weights as others write them, and those that are refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.targets.cuda.engine_generator.conftest import CONFIG, Folder

META = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.": "",
}


def logits_of(module: Any, folder: Path | str, config: dict[str, Any] = CONFIG) -> torch.Tensor:
    found: torch.Tensor = module.create_engine(config, folder, "cpu").prefill(
        [0], [torch.tensor([5, 6, 7])]
    )
    return found


def meta_named(name: str) -> str:
    for ours, theirs in META.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("form", ["meta", "wrapped", "prefixed", "bin", "safetensors", "shards"])
def test_other_names_and_files_hold_the_same_weights(
    form: str, module: Any, folder: Folder, tmp_path: Path
) -> None:
    expected = logits_of(module, folder())
    path = tmp_path / "model.pt"
    state = torch.load(path, weights_only=True)
    path.unlink()
    if form == "meta":
        torch.save({meta_named(name): each for name, each in state.items()}, path)
    elif form == "wrapped":
        torch.save({"state_dict": state, "step": 7}, tmp_path / "other.pt")
    elif form == "prefixed":
        torch.save({f"_orig_mod.module.{name}": each for name, each in state.items()}, path)
    elif form == "bin":
        torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    elif form == "safetensors":
        save_file(state, tmp_path / "model.safetensors")
    else:
        names = sorted(state)
        for index, part in enumerate((names[::2], names[1::2])):
            save_file({n: state[n] for n in part}, tmp_path / f"m-0000{index}-of-00002.safetensors")
    assert torch.equal(logits_of(module, tmp_path), expected)


def test_other_keys_say_the_same(module: Any, folder: Folder) -> None:
    made = folder()
    aliases = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "rms_norm_eps": "norm_eps"}
    aliases |= {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
    aliases |= {"rope_theta": "rope_base", "max_position_embeddings": "max_seq_len"}
    config = {aliases.get(key, key): value for key, value in CONFIG.items()}
    assert torch.equal(logits_of(module, made, config), logits_of(module, made))
    theta = config.pop("rope_base")
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    assert torch.equal(logits_of(module, made, config), logits_of(module, made))


BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "no 'vocab_size'": {"vocab_size": None},
    r"no 'hidden_size' \(or 'dim'\)": {"hidden_size": None},
    "no 'rms_norm_eps'": {"rms_norm_eps": None},
    "no 'head_dim'": {"head_dim": None, "hidden_size": 66},
    "num_attention_heads 4 and num_key_value_heads 3": {"num_key_value_heads": 3},
    "head_dim 23; allowed: an even number": {"head_dim": 23},
    "num_hidden_layers 0; allowed: a whole number": {"num_hidden_layers": 0},
    "num_hidden_layers True; allowed": {"num_hidden_layers": True},
    "vocab_size '96'; allowed": {"vocab_size": "96"},
    "rms_norm_eps nan; allowed: a number": {"rms_norm_eps": float("nan")},
    "torch_dtype 'int8'; allowed: float16": {"torch_dtype": "int8"},
    "rope_type 'yarn'; allowed: default, linear, llama3": {"rope_scaling": {"type": "yarn"}},
    "rope_scaling 3; allowed": {"rope_scaling": 3},
    "no 'factor'": {"rope_scaling": {"type": "linear"}},
    "rope_type 'dynamic'; allowed": {"rope_parameters": {"rope_type": "dynamic"}},
    "rope_style 'x'; allowed: interleaved, half": {"rope_style": "x"},
    "hidden_act 'gelu'; allowed: silu, swish": {"hidden_act": "gelu"},
    "attention_bias True; allowed: none": {"attention_bias": True},
    "sliding_window 4096; allowed: none": {"sliding_window": 4096},
}


@pytest.mark.parametrize("said", BAD_CONFIGS)
def test_a_bad_configuration_is_refused_by_key(said: str, module: Any, folder: Folder) -> None:
    with pytest.raises(ValueError, match=said):
        module.create_engine({**CONFIG, **BAD_CONFIGS[said]}, folder(), "cpu")


class Intruder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_file_of_weights_is_not_run(module: Any, tmp_path: Path) -> None:
    torch.save({"embed_tokens.weight": Intruder(tmp_path / "ran")}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="not a file of tensors alone, and nothing of it was run"):
        logits_of(module, tmp_path)
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Intruder(tmp_path / "ran")))
    with pytest.raises(ValueError, match="not a file of tensors alone"):
        logits_of(module, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_bad_weights_are_refused_by_name_and_shape(
    module: Any, folder: Folder, tmp_path: Path
) -> None:
    def refused(said: str, place: Path | str = tmp_path) -> None:
        with pytest.raises(ValueError, match=said):
            logits_of(module, place)

    refused("no such folder", tmp_path / "nowhere")
    refused("no weights; allowed: model.pt")
    state = torch.load(Path(folder()) / "model.pt", weights_only=True)
    name = "layers.1.mlp.up_proj.weight"
    whole = state.pop(name)
    torch.save(state, tmp_path / "model.pt")
    refused(r"no layers.1.mlp.up_proj.weight; expected: of shape \[96, 64\]")
    torch.save({**state, name: whole.T.contiguous()}, tmp_path / "model.pt")
    refused(r"up_proj.weight of shape \[64, 96\]; expected: \[96, 64\]")
    torch.save({**state, name: whole.to(torch.int8)}, tmp_path / "model.pt")
    refused("of torch.int8; expected: floats")
    bias = name.replace("weight", "bias")
    torch.save({**state, name: whole, bias: torch.zeros(96)}, tmp_path / "model.pt")
    refused("layers.1.mlp.up_proj.bias; expected: no biases")
    torch.save([whole], tmp_path / "model.pt")
    refused("a list; expected: a state dict")
    (tmp_path / "model.pt").write_bytes(b"")
    refused("not a file of tensors alone")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": 1}\n',
        b"HEADER",
    ],
)
def test_a_damaged_safetensors_file_is_refused(data: bytes, module: Any, tmp_path: Path) -> None:
    if data == b"HEADER":
        header = {"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors: (not a safetensors|a is not inside)"):
        logits_of(module, tmp_path)


def test_a_device_that_is_not_there_is_refused(module: Any, folder: Folder) -> None:
    with pytest.raises(ValueError, match="device 'meta'; allowed: cuda"):
        module.create_engine(CONFIG, folder(), "meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="GPUs that torch finds here: 0"):
            module.create_engine(CONFIG, folder(), "cuda")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--config", "no.json"), "no.json: Expecting property name"),
        (("--config", "list.json"), "model_config '[1]'; allowed: a mapping of keys"),
        (("--config", "bytes.json"), "bytes.json: 'utf-8' codec can't decode"),
        (("--config", "nowhere.json"), "No such file"),
        (("--operations", "0"), "--operations 0; allowed: 1 or more"),
        (("--device", "foo"), "device 'foo'; allowed: cuda, cuda:N, cpu"),
        (("--device", "cuda:99"), "device 'cuda:99'; GPUs that torch finds here: "),
    ],
)
def test_mistakes_in_the_self_tests_arguments_are_one_line(
    argv: tuple[str, str],
    said: str,
    module: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in (("no", b"{"), ("list", b"[1]"), ("bytes", b"\xff")):
        Path(f"{name}.json").write_bytes(data)
    assert module.main(["--self-test", *argv]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("engine: ") and said in error
