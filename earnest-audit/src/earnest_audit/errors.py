"""Errors for the user: each is a ``ValueError`` whose sentence has the value, what is allowed, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EarnestError(ValueError):
    """Base of every error that a user can cause and fix; the command line prints it without a traceback."""


class SubjectError(EarnestError):
    """A declaration of a subject is of another kind than it has to be, or a declared function gives another one."""


class Undeclared(EarnestError):
    """What an edit needs and neither the declarations nor the batch have; its text is the missing declaration."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'did you mean X?' for a known name that ``name`` may be a misspelling of, else the list of known names.

    People rarely mistype the first letter; a similar name that begins with another one is another thing. A name with
    few wrong letters comes first, then one that ``name`` begins with ("clip" for "clipping"), then the most similar.
    """
    names = sorted(known)
    similar = [known for known in names if known[:1].lower() == name[:1].lower()]
    begins = sorted((known for known in similar if known and name.lower().startswith(known.lower())), key=len)
    close = difflib.get_close_matches(name, similar, n=1, cutoff=0.8) or begins[-1:]
    close = close or difflib.get_close_matches(name, similar, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
