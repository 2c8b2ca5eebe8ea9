"""A connection to Ray: a named cluster, or a Ray that is started on this machine. Imports neither torch nor Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from earnest.errors import EarnestError, MissingExtra


class ClusterError(EarnestError):
    """No Ray cluster can be used."""


def connect(address: str, cpus: int) -> tuple[Any, bool]:
    """(ray, whether it was connected here): to ``address`` or $RAY_ADDRESS, or a Ray of this machine with room for
    ``cpus`` actors."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address and _has_token():  # Ray sends its token to a cluster only in this mode
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "running on Ray") from None
    if ray.is_initialized():
        return ray, False
    try:
        if address:
            ray.init(address=address, log_to_driver=False)
        else:
            # Every actor takes one of Ray's CPUs; a small machine may hold more actors than it has cores.
            # Ray's memory monitor would kill our actors because of other processes' memory, so it is off.
            os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
            # "local": without it Ray would look for a cluster that was left running here, and refuse num_cpus.
            room = max(cpus + 1, os.cpu_count() or 1)
            ray.init("local", num_cpus=room, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # Ray raises some of its failures as bare Exceptions
        what = f"no Ray cluster answers at {address}" if address else "Ray does not start on this machine"
        token = " (if it needs a token, set RAY_AUTH_TOKEN)" if address and not _has_token() else ""
        raise ClusterError(f"{what} ({first_line(error)}); try again{token}.") from None
    return ray, True


def _has_token() -> bool:
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").exists()


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
