"""An `earnest serve` that a run starts for itself (``sampler.port``): it samples for the run and for other programs.

The run pushes every version of its adapter there. Others request the model ``pushed``, which is the newest version. The
server ends when its standard input is closed, so it does not outlive a trainer that is killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earnest.errors import SamplingError

END = 15.0
"""Seconds that the server gets to finish its answers."""


class OwnServer:
    """The process; ``settings`` are those of ``earnest serve``. It has a session of its own: Ctrl-C lets the run finish
    its step, for which it needs the server."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="earnest-sampler-")
        place = Path(self._folder.name)
        given = json.dumps({**settings, "data": str(place / "data")})
        with (place / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "earnest.serve.server", given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        if found is None:
            lines = (place / "log").read_text().splitlines() or ["it ended without a message"]
            self.close()
            raise SamplingError(f"sampler.port: the server did not start: {lines[-1]}")
        self.url = found.group()

    def close(self) -> None:
        """End the server and remove its files."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._folder.cleanup()
