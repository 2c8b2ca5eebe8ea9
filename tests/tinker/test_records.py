"""Runs, checkpoints and sessions over REST, and what a restart leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.tinker.conftest import KEY, Served, datum
from tests.tinker.server import serving


def test_runs_and_checkpoints_are_listed_and_deleted(served: Served, rows: list[list[int]]) -> None:
    client = served.service.create_lora_training_client("earnest/nano", rank=2, user_metadata={"for": "records"})
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    state = client.save_state("s1", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
    sampler = client.save_weights_for_sampler("s1").result().path
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora, run.user_metadata) == (
        "earnest/nano",
        2,
        True,
        {"for": "records"},
    )
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint is not None and run.last_sampler_checkpoint.tinker_path == sampler
    listed = {c.tinker_path: c for c in rest.list_checkpoints(client.model_id).result().checkpoints}
    assert set(listed) == {state, sampler}
    assert listed[state].user_metadata == {"k": "v"} and listed[state].expires_at is not None
    assert (listed[sampler].size_bytes or 0) > 1000
    assert client.model_id in {r.training_run_id for r in rest.list_training_runs(limit=100).result().training_runs}
    assert state in {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints}
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("earnest/nano", 2, True)
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert {c.expires_at for c in rest.list_checkpoints(client.model_id).result().checkpoints} == {None}
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints] == [sampler]
    with pytest.raises(Exception, match="there is no checkpoint"):
        served.service.create_training_client_from_state(state)
    served.service.create_sampling_client(model_path=sampler)
    session = rest.get_session(served.service.holder.get_session_id()).result()
    assert client.model_id in session.training_run_ids
    found = rest.get_sampler(session.sampler_ids[-1]).result()
    assert (found.base_model, found.model_path) == ("earnest/nano", sampler)


def test_info_and_tokenizer(served: Served) -> None:
    client = served.training()
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("earnest/nano", 4, True)
    tokenizer = client.get_tokenizer()
    assert tokenizer.encode("Sort: c a b") == served.host.policy.encode("Sort: c a b")
    (model,) = served.service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == ("earnest/nano", 512, True)


def test_a_copy_of_a_sampling_client_in_another_process_samples(served: Served, rows: list[list[int]]) -> None:
    sampler = served.service.create_sampling_client(base_model="earnest/nano")
    copy = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY)
    prompt = types.ModelInput.from_ints(rows[2])
    assert copy.compute_logprobs(prompt).result() == sampler.compute_logprobs(prompt).result()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "create_model", b"{", 400),
        ("POST", "create_model", b"[]", 400),
        ("POST", "create_model", b'{"session_id": "x"}', 404),
        ("POST", "asample", b"{}", 400),
        ("POST", "retrieve_future", b'{"request_id": "x"}', 404),
        ("POST", "forward_backward", b"\x00\x01", 400),
        ("POST", "session_heartbeat", b'{"session_id": "x"}', 410),
        ("GET", "training_runs/..", b"", 404),
        ("GET", "training_runs/x", b"", 404),
        ("DELETE", "training_runs/x/checkpoints/weights/y", b"", 404),
        ("DELETE", "training_runs/x/checkpoints/weights/%2e%2e%2fy", b"", 400),
        ("GET", "training_runs?limit=-1", b"", 400),
        ("GET", "samplers/none", b"", 404),
        ("POST", "load_weights", b'{"model_id": "x", "path": "tinker://../weights/../x", "optimizer": true}', 400),
    ],
)
def test_malformed_requests_get_an_error_message(
    served: Served, method: str, path: str, body: bytes, status: int
) -> None:
    answer = httpx.request(method, f"{served.url}/api/v1/{path}", content=body, headers={"X-API-Key": KEY})
    assert answer.status_code == status and answer.json(), answer.text


UNSERVED: dict[str, Callable[[tinker.RestClient, tinker.TrainingClient, str], Any]] = {
    "copy_weights": lambda rest, client, path: rest.copy_weights(path, "p"),
    "publish_checkpoint": lambda rest, client, path: rest.publish_checkpoint_from_tinker_path(path),
    "unpublish_checkpoint": lambda rest, client, path: rest.unpublish_checkpoint_from_tinker_path(path),
    "save_weights_external": lambda rest, client, path: client.save_weights_external("x"),
    "get_external_weights_urls": lambda rest, client, path: rest.get_external_weights_urls(
        path.replace("sampler", "external")
    ),
    "search_sessions": lambda rest, client, path: rest.search_sessions(types.SessionSearchRequest()),
    "assign_session_project": lambda rest, client, path: rest.assign_session_project("a", "b"),
    "export_session_trace": lambda rest, client, path: rest.export_session_trace("a"),
}


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_what_the_sdk_offers_and_this_server_does_not_is_refused_and_listed(served: Served) -> None:
    client = served.training(rank=1)
    rest = tinker.RestClient(base_url=served.url, api_key=KEY)
    path = client.save_weights_for_sampler("x").result().path
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    listed = page.partition("Not served:")[2].partition("\n\n")[0]
    for name, call in UNSERVED.items():
        with pytest.raises(tinker.APIStatusError) as refused:
            call(rest, client, path).result()
        assert refused.value.status_code in (400, 404, 405), name
        assert f"`{name}`" in listed, name
    assert [c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints] == [path]
    # An abandoned sample is not cancelled: the SDK is told so, and does not ask.
    switches = httpx.post(f"{served.url}/api/v1/client/dynamic_config", headers={"X-API-Key": KEY}).json()
    gone = httpx.post(f"{served.url}/api/v1/cancel_future", json={"request_id": "x"}, headers={"X-API-Key": KEY})
    assert switches["sample_cancel_enabled"] is False and gone.status_code == 404 and "`cancel_future`" in listed


def test_checkpoints_survive_a_restart_and_models_in_memory_do_not(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 9]
    data = [datum(ids, weights=torch.ones(4))]
    with serving(tmp_path) as (url, host):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        client = service.create_lora_training_client("earnest/nano", rank=2, seed=1)
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        state = client.save_state("kept").result().path
        weights = client.save_weights_for_sampler("kept").result().path
        lp = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
        run = client.model_id
        service.close("success").result()
        assert not any(name.startswith("tinker ") and "sampler" not in name for name in host.attached())
    with serving(tmp_path) as (url, host):
        gone = httpx.post(f"{url}/api/v1/get_info", json={"model_id": run}, headers={"X-API-Key": KEY})
        assert gone.status_code == 404 and "last state" in gone.json()["detail"]
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        client = service.create_training_client_from_state_with_optimizer(state)
        assert client.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(lp, rel=1e-6)
        found = service.create_sampling_client(model_path=weights).compute_logprobs(types.ModelInput.from_ints(ids))
        assert -sum(v for v in found.result()[1:] if v is not None) == pytest.approx(lp, rel=1e-5)
        service.close("success").result()


def test_a_session_ends_once_or_without_heartbeats(served: Served, tmp_path: Path) -> None:
    import asyncio

    from earnest.serve.store import ServerStore
    from earnest.serve.tinker import service as module
    from earnest.serve.tinker.data import JsonResult

    assert httpx.get(f"{served.url}/api/v1/healthz").json() == {"status": "ok"}
    store = ServerStore(tmp_path)
    service = module.Service(served.host, store)

    def create(session: str) -> str:
        body = {"session_id": session, "model_seq_id": 0, "base_model": "earnest/nano", "lora_config": {"rank": 2}}
        result = asyncio.run(service.create_model(body).wait(60))
        assert isinstance(result, JsonResult)
        return f"tinker {result.body['model_id']}"

    first, second, third = (service.create_session({})["session_id"] for _ in range(3))
    one, two = create(first), create(second)
    assert {one, two} <= set(served.host.attached())
    service.finish_session(first)
    service.finish_session(first)
    service.sessions[second].last_heartbeat -= module.SESSION_TIMEOUT + 1
    service.heartbeat(third)
    three = create(third)
    assert {one, two, three} & set(served.host.attached()) == {three}
    for ended in (first, second):
        with pytest.raises(ValueError, match="has ended"):
            service.heartbeat(ended)
    service.finish_session(third)
    service.close()
    store.close()
