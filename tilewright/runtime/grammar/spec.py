"""Output grammars as requested, before compilation.

Imports neither torch nor the grammar library.
"""

from __future__ import annotations

from dataclasses import dataclass

JSON_SCHEMA, REGEX, CHOICE, LARK = "json_schema", "regex", "choice", "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar for all tokens of an output, starting at a defined point.

    Attributes:
        kind: ``json_schema``, ``regex``, ``choice`` or ``lark``.
        text: The schema as JSON text, the regular expression, a JSON list of texts, or the grammar
            in llguidance's Lark.
        behind: Text in the output after which the grammar begins, for example ``</think>``. Empty:
            the grammar begins with the first token.
        opener: A token allowed at the first position in addition to the grammar. The grammar then
            begins after ``behind``. None: if ``behind`` is not empty, wait for this text.
    """

    kind: str
    text: str
    behind: str = ""
    opener: int | None = None
