"""`earnest serve` as the child of a run (``sync.own_server``): it ends when its standard input is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading

from earnest.errors import EarnestError
from earnest.serve.server import run
from earnest.serve.settings import ServeSettings


def main(settings: str) -> int:
    """Serve with these settings (JSON)."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="earnest-parent", daemon=True).start()
    try:
        run(ServeSettings.model_validate_json(settings))
    except EarnestError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
