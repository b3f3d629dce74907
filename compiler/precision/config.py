"""PrecisionConfig: a named configuration, as a chain of sources from the base to itself.

Knows no files (reading makes it) and no model (resolve applies it to one).
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
    """What a user chose: formats by tensor group, fidelities by op group, and exceptions.

    ``fragments`` is the chain, the base first and this configuration's own last; ``inherits``
    names what it stands on (None for the base itself). The maps below are merged over the chain,
    before any exception by model or layer.
    """

    name: str
    description: str
    inherits: str | None
    fragments: tuple[Fragment, ...]

    @property
    def precision(self) -> Settings:
        """Format by tensor group, in canonical order."""
        return self._ordered(TENSOR_GROUPS)

    @property
    def fidelity(self) -> Settings:
        """Fidelity by op group, in canonical order, equal phases folded."""
        return self._ordered(OP_GROUPS)

    @property
    def layers(self) -> tuple[LayerRule, ...]:
        """Every rule by layer or name, weakest first."""
        return tuple(rule for fragment in self.fragments for rule in fragment.rules)

    @property
    def models(self) -> tuple[str, ...]:
        """The normalised names of the models with an exception."""
        return tuple(sorted({name for fragment in self.fragments for name in fragment.models}))

    @property
    def block_axis(self) -> str:
        """``in`` or ``out``: the axis of a weight [in, out] that its blocks run along."""
        axes = [f.block_axis for f in self.fragments if f.block_axis is not None]
        return axes[-1]

    def resolve(
        self,
        num_layers: int,
        model_name: str | None = None,
        *,
        modules: Iterable[GroupedModule] = (),
    ) -> ResolvedPrecision:
        """Apply the configuration to a model; with its ``modules``, every rule must reach one.

        Raises:
            ConfigError: for a layer the model does not have, or a rule without an effect.
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
