"""A named precision configuration, stored as a source chain from the base to the named file.

``reading`` makes it from files. ``resolve`` applies it to a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.compiler.precision.fragment import Fragment, LayerRule, Settings
from tilewright.compiler.precision.hits import GroupedModule
from tilewright.compiler.precision.names import OP_GROUPS, TENSOR_GROUPS
from tilewright.compiler.precision.phases import compact_settings
from tilewright.compiler.precision.resolve import ResolvedPrecision, resolve_fragments


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """A user's choice: formats by tensor group, fidelities by op group, and exceptions.

    The maps below merge the whole chain, before exceptions by model or layer.

    Attributes:
        name: The configuration's name.
        description: One line for lists.
        inherits: The parent configuration's name. None for the base.
        fragments: The chain: the base first, this configuration's own fragment last.
    """

    name: str
    description: str
    inherits: str | None
    fragments: tuple[Fragment, ...]

    @property
    def precision(self) -> Settings:
        """Return the format by tensor group, in canonical order."""
        return self._ordered(TENSOR_GROUPS)

    @property
    def fidelity(self) -> Settings:
        """Return the fidelity by op group, in canonical order. Equal phases are folded."""
        return self._ordered(OP_GROUPS)

    @property
    def layers(self) -> tuple[LayerRule, ...]:
        """Return all rules by layer or name, weakest first."""
        return tuple(rule for fragment in self.fragments for rule in fragment.rules)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the normalized names of models with an exception."""
        return tuple(sorted({name for fragment in self.fragments for name in fragment.models}))

    @property
    def block_axis(self) -> str:
        """Return ``in`` or ``out``: the block axis of a weight [in, out]."""
        axes = [f.block_axis for f in self.fragments if f.block_axis is not None]
        return axes[-1]

    def resolve(
        self,
        num_layers: int,
        model_name: str | None = None,
        *,
        modules: Iterable[GroupedModule] = (),
    ) -> ResolvedPrecision:
        """Apply the configuration to a model. With ``modules``, each rule must match a
        module.

        Raises:
            ConfigError: A layer does not exist, or a rule has no effect.
        """
        return resolve_fragments(
            self.fragments, num_layers=num_layers, model_name=model_name, modules=modules
        )

    def _ordered(self, groups: Iterable[str]) -> Settings:
        merged: dict[str, str] = {}
        for fragment in self.fragments:
            merged |= fragment.settings
        compact = compact_settings(merged)
        return {key: compact[key] for key in groups if key in compact}
