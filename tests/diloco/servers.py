"""A real S3 server for tests: SeaweedFS on free ports, which can be killed and started again on its data."""

from __future__ import annotations

import os
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

BUCKET = "runs"


def free_ports(count: int) -> list[int]:
    """Ports whose gRPC twin, 10,000 above, is free, too: SeaweedFS takes both."""
    found: list[int] = []
    held: list[socket.socket] = []
    while len(found) < count:
        one = socket.socket()
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        twin = socket.socket()
        try:
            if not 20_000 < port < 50_000:
                raise OSError
            twin.bind(("127.0.0.1", port + 10_000))
        except OSError:
            one.close()
            twin.close()
            continue
        held += [one, twin]
        found.append(port)
    for one in held:
        one.close()
    return found


class Seaweed:
    """One server process: master, volume, filer and S3 gateway; 8 volumes of ``volume_mb`` are all its room."""

    def __init__(self, folder: Path, volume_mb: int = 64) -> None:
        self.folder, self.volume_mb = folder, volume_mb
        self.master, self.volume, self.filer, self.s3 = free_ports(4)
        self.process: subprocess.Popen[bytes] | None = None
        self.made = False

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which a worker finds it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        }

    def start(self) -> Seaweed:
        weed = Path(sysconfig.get_path("scripts")) / "weed"
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [
            "server",
            f"-dir={self.folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={self.master}",
            f"-volume.port={self.volume}",
            "-volume.max=8",
            f"-master.volumeSizeLimitMB={self.volume_mb}",
            "-master.telemetry=false",
            "-filer",
            f"-filer.port={self.filer}",
            "-s3",
            f"-s3.port={self.s3}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(weed), *words], stdout=log, stderr=log, env={**os.environ, "HOME": str(self.folder)}
            )
        self._until_it_answers()
        return self

    def _until_it_answers(self) -> None:
        url = f"http://127.0.0.1:{self.s3}/{BUCKET}"
        for _ in range(600):
            assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=2).close()
                self.made = True
                return
            except urllib.error.HTTPError as error:
                error.close()
                if self.made and error.code < 500:  # it is there from before
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError("SeaweedFS did not answer within a minute")

    def stop(self) -> None:
        """Kill it, as when a machine loses power."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
