"""What the text of an answer must be: how a request says it, before anything is compiled.

Imports neither torch nor the library that enforces it.
"""

from __future__ import annotations

from dataclasses import dataclass

JSON_SCHEMA, REGEX, CHOICE, LARK = "json_schema", "regex", "choice", "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar that every token of an answer obeys, from a place in the answer on.

    Attributes:
        kind: ``json_schema``, ``regex``, ``choice`` or ``lark``.
        text: the schema as JSON text, the regular expression, a JSON list of the texts to choose
            from, or the grammar in llguidance's Lark.
        behind: text of the answer behind which the grammar begins, as ``</think>``; empty: with
            the first token.
        opener: a token that may be chosen first instead of what the grammar allows; the grammar
            then begins behind ``behind``. None: where ``behind`` is not empty, it is waited for.
    """

    kind: str
    text: str
    behind: str = ""
    opener: int | None = None
