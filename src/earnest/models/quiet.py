"""Transformers without progress bars and advice. Its errors are still raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Transformers imports these if they are installed; they warn about GPU kernels that a CPU build of torch lacks.
CHATTY = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from transformers.utils import logging as theirs

        level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
        theirs.set_verbosity_error()
        theirs.disable_progress_bar()
        try:
            yield
        finally:
            theirs.set_verbosity(level)
            if bars:
                theirs.enable_progress_bar()
    finally:
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
