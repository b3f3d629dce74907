"""What values, weights and caches take on a chip, and what a program lists of its operands."""

from __future__ import annotations

import pytest

from tests.targets.tenstorrent.boards import programs
from tests.tiny import tiny_model
from tilewright.compiler.formats import FIDELITIES
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DRAM,
    L1,
    WIDTH_SHARDED,
    ComputeConfig,
    Memory,
    TtValue,
    tile_bytes,
)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("bf16", 2048), ("bfp8", 1088), ("bfp4", 576), ("fp32", 4096), ("int32", 4096)],
)
def test_tiles_of_a_format(name: str, num_bytes: int) -> None:
    assert tile_bytes(name) == num_bytes
    value = TtValue("x", 33, 64, name, Memory())
    assert (value.tiles, value.num_bytes) == ((2, 2), 4 * num_bytes)


def test_memories_are_spelled() -> None:
    assert str(Memory()) == DRAM == "dram"
    assert str(Memory(L1, WIDTH_SHARDED, 30)) == "l1:width_sharded/30"


@pytest.mark.parametrize("name", FIDELITIES)
def test_a_compute_configuration_is_its_fidelity_s(name: str) -> None:
    config, fidelity = ComputeConfig(name), FIDELITIES[name]
    assert config.num_phases == fidelity.num_phases
    assert config.approx == fidelity.approx
    assert (config.fp32_dst, config.l1_acc) == (fidelity.fp32_dest, fidelity.packer_l1_acc)


def test_weights_and_caches_are_listed_once() -> None:
    """Rotary frequencies are read four times; keys stand before values, layer by layer."""
    prefill, decode = programs(tiny_model())
    names = [weight.name for weight in decode.weights]
    assert len(names) == len(set(names)) == 1 + 2 * 7 + 3
    assert names == [weight.name for weight in prefill.weights]
    caches = [cache.name for cache in decode.caches]
    expected = [f"model.layers.{n}.self_attn.kv.{kind}" for n in (0, 1) for kind in "kv"]
    assert caches == [cache.name for cache in prefill.caches] == expected


def test_both_programs_read_the_same_weights() -> None:
    """One copy serves both phases."""
    for mesh in (Mesh(), Mesh(2), Mesh(4, 2)):
        prefill, decode = programs(tiny_model(), mesh)
        assert prefill.weights == decode.weights


def test_weights_are_filled_up_to_the_banks() -> None:
    _, decode = programs(tiny_model(num_layers=1))
    weights = {weight.name.rpartition(".")[0]: weight for weight in decode.weights}
    down = weights["model.layers.0.mlp.down_proj"]
    assert (down.rows, down.columns) == (48, 32)
    assert (down.tiles, down.num_bytes) == ((2, 12), 2 * 12 * 1088)
    table = weights["model.embed_tokens"]
    assert (table.rows, table.columns) == (61, 32)
    assert (table.tiles, table.num_bytes) == ((2, 1), 2 * 2048)


def test_a_cache_is_whole_pages_of_every_user() -> None:
    _, decode = programs(tiny_model(num_layers=1, head_dim=48))
    for cache in decode.caches:
        assert (cache.num_pages, cache.page, cache.num_heads) == (4 * 2, 32, 2)
        assert cache.num_bytes == 8 * 2 * 2 * 1088
