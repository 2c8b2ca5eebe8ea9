"""A process that grades with the user's code: ``python -m earnest.tasks.worker``. ``processes`` starts it and ends it.

It reads and writes pickled messages on its standard input and output. What the user's code prints goes to standard
error, so it cannot damage a message.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from earnest import plugins
from earnest.tasks.processes import RAISED_AT, raised_at


def main() -> None:
    """Load each (key, subject, None), and answer each (key, None, arguments) with the result, until the input ends. An
    answer is (True, result) or (False, exception)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the run, which then ends its workers
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdin.close()
    subjects: dict[str, Any] = {}
    while True:
        try:
            key, subject, arguments = pickle.load(inbox)
        except EOFError:
            return
        try:
            if subject is not None:
                path, files, made = pickle.loads(subject)
                sys.path[:] = path
                for file in files:
                    plugins.load(file)
                subjects[key] = pickle.loads(made)
            answer = (True, None if arguments is None else subjects[key](*arguments))
        except Exception as error:
            vars(error)[RAISED_AT] = raised_at(error)
            answer = (False, error)
        try:
            sent = pickle.dumps(answer)
        except Exception:  # what the user's code returned or raised has no pickled form
            plain = RuntimeError(f"{type(answer[1]).__name__}: {answer[1]}")
            vars(plain)[RAISED_AT] = getattr(answer[1], RAISED_AT, "")
            sent = pickle.dumps((False, plain))
        outbox.write(len(sent).to_bytes(8, "big") + sent)
        outbox.flush()


if __name__ == "__main__":
    main()
