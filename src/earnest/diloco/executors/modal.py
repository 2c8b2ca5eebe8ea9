"""Replicas as Modal containers: one function call, one ``earnest worker`` each.

    --on modal             CPU containers
    --on modal:A10G        with a GPU of this kind

The containers get this very source tree with its data files (Modal's own default leaves out everything that is not
Python, the embedded model included), and the dependencies from PyPI.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import requires
from typing import Any, ClassVar

from earnest.diloco.executors.base import LOST, ExecutorError, Job, Polled, demand_gpu, elsewhere
from earnest.errors import MissingExtra

HOURS = 24
"""A call's limit: Modal's own default is 5 minutes."""
TOKEN = (
    "Modal needs a token: make an account at modal.com, then run `modal token new`, or set MODAL_TOKEN_ID and "
    "MODAL_TOKEN_SECRET."
)
SOURCES = ("earnest", "earnest_audit")
IGNORED = ["**/__pycache__/**", "**/*.pyc"]


def work(words: list[str]) -> tuple[int, str]:
    """In the container: run ``earnest WORDS`` to its end. (exit code, the end of its output)."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "earnest.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, " ".join(done.stdout[-400:].decode(errors="replace").split())


class ModalExecutor(Polled):
    """``option`` is a GPU; empty: none."""

    name: ClassVar[str] = "modal"

    def __init__(self, option: str = "") -> None:
        super().__init__()
        self.gpu = option or None
        self._inside = contextlib.ExitStack()
        self._function: Any = None

    def settings(self) -> dict[str, Any]:
        """The arguments of ``app.function``, apart from the image and the secrets."""
        return {
            "name": "worker",
            "gpu": self.gpu,
            "timeout": HOURS * 3600,
            "retries": 0,  # ``supervise`` starts replicas again, the same way everywhere
            "serialized": True,
            "single_use_containers": True,
        }

    def packages(self) -> list[str]:
        """What the container installs: the dependencies of earnest and of ``earnest[diloco]``. Our own sources are
        copied there (``SOURCES``)."""
        wanted = []
        for line in requires("earnest") or []:
            need, _, when = line.partition(";")
            if (not when or "diloco" in when) and not need.startswith("earnest-audit"):
                wanted.append(need.strip())
        return wanted

    def _job(self, job: Job) -> Job:
        job = elsewhere(job, "modal")
        demand_gpu(job, self.gpu is not None, "modal", "modal:A10G")
        return job

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        job = self._job(job)
        image = {"python": _python(), "uv_pip_install": self.packages(), "add_local_python_source": list(SOURCES)}
        return [
            {"app": "earnest", "image": image, "function": self.settings(), "secrets": sorted(job.env)}
            | {"spawn": job.words(i)}
            for i in range(job.replicas)
        ]

    def build(self, job: Job) -> tuple[Any, Any]:
        """(app, function): real objects of the SDK, nothing submitted."""
        modal = _modal()
        image = (
            modal.Image.debian_slim(python_version=_python())
            .uv_pip_install(*self.packages())
            .add_local_python_source(*SOURCES, ignore=IGNORED)
        )
        app = modal.App("earnest", include_source=False)
        secrets = [modal.Secret.from_dict(dict(job.env))] if job.env else []
        return app, app.function(image=image, secrets=secrets, **self.settings())(work)

    def start(self, job: Job, replica: int, attempt: int) -> None:
        job = self._job(job)
        modal = _modal()
        try:
            if self._function is None:
                app, function = self.build(job)
                self._inside.enter_context(app.run())
                self._function = function
            self.running[replica] = (attempt, self._function.spawn(job.words(replica)))
        except modal.exception.AuthError as error:
            raise ExecutorError(f"--on modal: {TOKEN} ({error})") from None
        except modal.exception.Error as error:
            raise ExecutorError(f"--on modal: replica {replica} was not started: {error}") from None

    def look(self, handle: Any) -> tuple[int, str] | None:
        try:
            code, words = handle.get(timeout=0)
        except TimeoutError:
            return None  # it still runs (modal.exception.TimeoutError is one, too)
        except _modal().exception.Error as error:
            code, words = LOST, f"its container is gone: {error}"
        return code, words

    def stop(self) -> None:
        for _, call in self.running.values():
            call.cancel(terminate_containers=True)
        self.running.clear()
        self._function = None
        self._inside.close()


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"  # what is pickled here is unpickled there


def _modal() -> Any:
    os.environ.setdefault("MODAL_TRACEBACK", "0")
    try:
        import modal
        import modal.exception
    except ImportError:
        raise MissingExtra("modal", "modal", "running on Modal") from None
    return modal
