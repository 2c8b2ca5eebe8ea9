"""Anything at all, sent to every route of the Tinker wire: an answer, never a server error."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earnest.serve.host import Host
from earnest.serve.settings import ServeSettings
from earnest.serve.store import ServerStore
from earnest.serve.tinker.routes import router
from tests.tinker.conftest import KEY, Served


def _routes() -> list[tuple[str, str]]:
    with TemporaryDirectory() as folder:
        store = ServerStore(Path(folder))
        found = router(Host(ServeSettings()), store).routes
        store.close()
    return sorted((method, route.path) for route in found if isinstance(route, APIRoute) for method in route.methods)


ROUTES = _routes()
FIELDS = (
    "session_id", "model_id", "sampling_session_id", "request_id", "base_model", "model_seq_id", "lora_config",
    "sampling_session_seq_id", "rank", "seed", "seq_id", "path", "tinker_path", "model_path", "ttl_seconds",
    "user_metadata", "prompt", "chunks", "tokens", "type", "sampling_params", "max_tokens", "num_samples", "stop",
    "adam_params", "learning_rate", "forward_backward_input", "data", "loss_fn", "loss_fn_config", "loss_fn_inputs",
    "prompt_logprobs", "topk_prompt_logprobs", "optimizer_config", "overwrite", "optimizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def names(served: Served) -> dict[str, str]:
    """What exists there."""
    client = served.service.create_lora_training_client("earnest/nano", rank=2, seed=0)
    path = client.save_state("fuzzed").result().path
    session = client.model_id.partition(":")[0]
    base = served.service.create_sampling_client(base_model="earnest/nano")
    return {
        "model_id": client.model_id,
        "run": client.model_id,
        "session_id": session,
        "sampler_id": base._sampling_session_id,
        "tinker_path": path,
        "checkpoint": "weights/fuzzed",
        "base_model": "earnest/nano",
    }


def _values(names: dict[str, str]) -> st.SearchStrategy[Any]:
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-2, 5)
        | st.sampled_from([2**63, -(2**70), 1e308, float("inf"), float("nan"), "", "\x00", "../x", "encoded_text"])
        | st.text(max_size=5)
        | st.sampled_from(sorted(names.values()))
    )
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
        max_leaves=12,
    )


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=lambda v: v)
def test_no_route_fails(served: Served, names: dict[str, str], method: str, path: str) -> None:
    if path.endswith("/finish"):
        names = {**names, "session_id": "f" * 32}  # or nothing would be left to fuzz
    with httpx.Client(base_url=served.url, headers={"X-API-Key": KEY}, timeout=60) as http:

        @settings(
            max_examples=max(1, settings().max_examples // 4),
            suppress_health_check=list(HealthCheck),
            database=None,
            deadline=None,
        )
        @given(st.data())
        def one(data: st.DataObject) -> None:
            body = data.draw(st.dictionaries(st.sampled_from(FIELDS), _values(names), max_size=6) | _values(names))
            if isinstance(body, dict):
                body |= {k: v for k, v in names.items() if k in FIELDS and data.draw(st.booleans())}
            filled = path
            for name in ("session_id", "sampler_id", "run", "checkpoint"):
                value = names[name] if data.draw(st.booleans()) else "weights/none" if name == "checkpoint" else "none"
                filled = filled.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
            content = json_with_everything(body)
            found = http.request(method, filled, content=content, headers={"Content-Type": "application/json"})
            assert found.status_code < 500, (body, found.text)
            if found.status_code >= 400 and found.status_code != 408:
                assert found.json()["detail"], found.text

        one()


def json_with_everything(body: Any) -> bytes:
    """Infinity and nan too, which Python reads; texts that are no Unicode as they come."""
    import json

    return json.dumps(body).encode()


def test_every_route_is_here() -> None:
    assert len(ROUTES) >= 28 and ("POST", "/api/v1/forward_backward") in ROUTES
