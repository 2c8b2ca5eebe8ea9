"""Names of adapters. A name never becomes a path: folders are numbered."""

from __future__ import annotations

import re

from earnest.serve.errors import BadRequest

NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,32}){0,2}(/[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,32}){0,2})?"
)
RESERVED = frozenset(
    {"base", "versions", "diff", "rollback", "promote", "pin", "fork", "export", "cancel", "resume", "purge"}
)
PUSHED_LAST = "pushed"
"""The model's name that means the adapter that was pushed last."""


def check_name(name: str) -> str:
    """The name, if it is one or two words that no route uses; else raise."""
    if not NAME.fullmatch(name) or RESERVED & set(name.split("/")) or name == PUSHED_LAST:
        raise BadRequest(
            f"{name[:80]!r} is not a name for an adapter; give one or two words of letters, digits, '-' and '_' with a "
            f"'/' between them, such as team/assistant; taken words: {', '.join(sorted(RESERVED | {PUSHED_LAST}))}.",
            "name",
        )
    return name
