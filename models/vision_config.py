"""Vision tower configurations as plain dataclasses, independent from the container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.images.squares import AnyProcessor
    from tilewright.models.architectures.gemma3_vision import SquareTowerConfig
    from tilewright.models.architectures.mllama_vision import TileTowerConfig


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Qwen vision tower sizes.

    Attributes:
        num_layers: Block count.
        hidden_size: Tower width.
        num_heads: Head count.
        intermediate_size: Inner feed-forward width.
        patch_size: Patch side in pixels.
        num_frames: Frames per patch. A still image repeats its frame.
        merge_size: Block side in patches.
        num_positions: Rows in the square position grid.
        output_size: Embedding width in the text model.
        rotary_axes: Coordinate per rotated pair in the text model: 0 time, 1 height, 2 width.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    num_frames: int
    merge_size: int
    num_positions: int
    output_size: int
    rotary_axes: tuple[int, ...]

    @property
    def patch_width(self) -> int:
        """Return the value count per patch."""
        return 3 * self.num_frames * self.patch_size**2

    @property
    def grid_side(self) -> int:
        """Return the position grid's side."""
        return round(self.num_positions**0.5)


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision tower before compilation.

    Attributes:
        config: Sizes.
        module: The tower on the meta device.
        processor: Image processor.
        text_module: The text model with cross-attention layers. None: images are embeddings in the
            prompt.
    """

    config: VisionConfig | TileTowerConfig | SquareTowerConfig
    module: Any
    processor: AnyProcessor
    text_module: Any = None

    @property
    def modules(self) -> tuple[Any, ...]:
        """Return the modules with tensors."""
        return (self.module,) if self.text_module is None else (self.module, self.text_module)
