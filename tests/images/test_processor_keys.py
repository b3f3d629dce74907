"""Keys of towers and image processors in files: other meanings are refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.images.tiny_gemma import PROCESSOR as SQUARE
from tests.images.tiny_gemma import save_gemma, tiny_gemma
from tilewright.compiler import driver
from tilewright.compiler.driver import tower_bytes
from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.checkpoints.huggingface.vision import read_vision, vision_of
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.shapes import SHAPES
from tilewright.models.vision_shapes import PROCESSOR

QWEN, TILES, GEMMA = "tiny-hybrid-vision", "tiny-vision", "gemma"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(tiny_gemma(), tmp_path_factory.mktemp("gemma") / "tiny")


def read(name: str, folder: Path, changes: dict[str, Any], **config: Any) -> Any:
    """The tower and processor with changed keys."""
    if name != GEMMA:
        values: Any = {**SHAPES[name], **config}
        own = Keys({**values[PROCESSOR], **changes}, "m/preprocessor_config.json")
        return vision_of(Keys(values, "m"), config_of_hf(values, where="m"), own)
    values = {**json.loads((folder / "config.json").read_text()), **config}
    text = load_model(folder).config
    return vision_of(Keys(values, "m"), text, Keys({**SQUARE, **changes}, "m"))


@pytest.mark.parametrize("name", [QWEN, TILES, GEMMA])
def test_other_pixels_are_refused(name: str, folder: Path) -> None:
    usual = {"do_resize": True, "do_rescale": True, "do_normalize": None}
    for factor in (0.00392156862745098, 0.003921569, None):
        assert read(name, folder, {**usual, "rescale_factor": factor}) is not None
    for key, value in (
        *(("do_resize", False), ("do_rescale", False), ("do_normalize", False)),
        *(("rescale_factor", 1 / 127.5), ("rescale_factor", 1), ("rescale_factor", "a")),
    ):
        with pytest.raises(CheckpointError, match=f"{key} = .*allowed: ") as caught:
            read(name, folder, {key: value})
        assert "\n" not in str(caught.value)


def test_windows_below_an_image_and_placeholders_beyond_the_vocabulary_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    for token in (264, None):  # null: 262144
        with pytest.raises(CheckpointError, match=r"image_token_index .*from 0 to 263"):
            read(GEMMA, folder, {}, image_token_index=token)
    for window in (16, 15):
        values = json.loads((folder / "config.json").read_text())
        values["text_config"]["sliding_window"] = window
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = config_of_hf(values["text_config"], where=tmp_path)
        if window == 16:
            assert read_vision(values, config, tmp_path)[0] is None, "no processor"
            continue
        with pytest.raises(CheckpointError, match=r"mm_tokens_per_image = 16 .*allowed: 1 to 15"):
            read_vision(values, config, tmp_path)


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_tower_bytes_have_the_cache_of_embeddings(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder if name == GEMMA else f"shape:{name}")
    num_bytes = tower_bytes(model)
    monkeypatch.setattr(driver, "IMAGE_CACHE_BYTES", 0)
    tokens, width = (16, 48) if name == GEMMA else ((1 << 24) // 32**2, 64)
    assert num_bytes - tower_bytes(model) == 32 * 4 * tokens * width
