"""Adapters from elsewhere: vLLM's routes and an upload; no path of a request leads out of one folder."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import earnest as en
from earnest.serve.errors import TooLarge
from earnest.serve.push import unzipped
from tests.serve.conftest import Live

NAME = "pushed/one"


@pytest.fixture(scope="module")
def trained(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA that moves the model, in both formats. After the server's load: Python 3.11 cannot compile in two threads,
    as the test process does with every module for its type checks."""
    live.state.host.wait()
    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=2), targets=["q_proj"])
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.add_(0.1)
    return adapter.save(tmp_path_factory.mktemp("trained") / "adapter", "nano")


@pytest.fixture(autouse=True)
def tidy(live: Live) -> Iterator[None]:
    yield
    live.http.delete(f"/v1/adapters/{NAME}")


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def upload(live: Live, content: bytes, **query: Any) -> Any:
    return live.http.post("/v1/upload_lora_adapter", params={"lora_name": NAME, **query}, content=content)


def load(live: Live, path: str, **more: Any) -> Any:
    return live.http.post("/v1/load_lora_adapter", json={"lora_name": NAME, "lora_path": path, **more})


def unload(live: Live) -> None:
    assert live.http.post("/v1/unload_lora_adapter", json={"lora_name": NAME}).status_code == 200


def score(live: Live, model: str) -> float:
    body = {"model": model, "messages": [{"role": "user", "content": "Describe the sea."}], "completion": "It is wide."}
    return live.post("/v1/score", body)["logprob_sum"]


def here(folder: Path) -> float:
    """The same score by the model itself, with the adapter that was saved."""
    policy = en.load("nano")
    en.load_adapter(policy, folder)
    messages = [{"role": "user", "content": "Describe the sea."}]
    prompt = policy.render(messages)
    answer = policy.encode("It is wide.")
    ids = torch.tensor([[*prompt, *answer, next(iter(policy.eos_ids))]])
    with torch.no_grad():
        logprobs = policy.model(ids[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
    return float(logprobs.gather(-1, ids[0, len(prompt) :, None]).sum())


def test_an_upload_answers_at_once_and_is_gone_when_unloaded(live: Live, trained: Path) -> None:
    assert upload(live, zipped(files(trained))).status_code == 200
    assert score(live, NAME) == pytest.approx(here(trained), abs=1e-3)
    assert abs(score(live, NAME) - score(live, "base")) > 0.05
    said = live.chat(NAME)
    assert said["adapter_version"] == 1
    version = live.get(f"/v1/adapters/{NAME}/versions/1")
    assert version["gate"]["holds"] is None and version["audit"]["holds"] is None, "nothing was checked here"
    assert upload(live, zipped(files(trained))).status_code == 409
    assert upload(live, zipped(files(trained)), load_inplace=True).status_code == 200
    refused = live.http.post("/v1/feedback", json={"completion_id": live.chat(NAME)["id"], "thumbs": "up"})
    assert refused.status_code == 409 and "trained elsewhere" in refused.json()["error"]["message"]
    assert live.http.post(f"/v1/adapters/{NAME}/fork", json={"name": "pushed/child"}).status_code == 409
    live.post(f"/v1/adapters/{NAME}/rollback", {"version": 0})
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    assert live.http.post("/v1/chat/completions", json=body).status_code == 404
    unload(live)
    assert NAME not in [m["id"] for m in live.get("/v1/models")["data"]]
    assert live.http.post("/v1/unload_lora_adapter", json={"lora_name": "assistant"}).status_code == 409


def test_an_export_can_be_pushed_back(live: Live, trained: Path) -> None:
    """The upload takes what the export gives, also PEFT's pair alone."""
    assert upload(live, zipped(files(trained))).status_code == 200
    whole = live.http.get(f"/v1/adapters/{NAME}/versions/1/export").content
    before = score(live, NAME)
    unload(live)
    assert upload(live, whole).status_code == 200
    assert score(live, NAME) == before
    unload(live)
    peft = {n: b for n, b in files(trained).items() if n.startswith("adapter_")}
    assert len(peft) == 2 and upload(live, zipped(peft)).status_code == 200
    assert score(live, NAME) == pytest.approx(before, abs=1e-4)
    unload(live)


def test_a_path_is_looked_up_in_one_folder_only(live: Live, trained: Path, tmp_path: Path) -> None:
    place = live.state.settings.data / "loras"
    (place / "mine").mkdir(parents=True)
    for name, data in files(trained).items():
        (place / "mine" / name).write_bytes(data)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name, data in files(trained).items():
        (outside / name).write_bytes(data)
    (place / "link").symlink_to(outside)
    (place / "inner").mkdir()
    for name in files(trained):
        (place / "inner" / name).symlink_to(outside / name)
    others = live.state.settings.data / "adapters"
    bad = [
        str(outside),
        "../adapters/1/1/adapter",
        str(others),
        "link",
        "inner",
        ".",
        "..",
        "/etc",
        "nothing",
        "a\x00b",
    ]
    for path in bad:
        found = load(live, path)
        assert found.status_code == 400, path
        assert str(tmp_path) not in found.text and "DATA/loras" in found.text
    for path in ("mine", str((place / "mine").resolve())):
        assert load(live, path).status_code == 200
        assert score(live, NAME) == pytest.approx(here(trained), abs=1e-3)
        unload(live)


def test_an_upload_that_is_not_an_adapter_leaves_no_files(live: Live, trained: Path) -> None:
    good = files(trained)
    meta = json.loads(good["earnest_adapter.json"])
    attached = live.state.host.attached()
    for content, status in [
        (b"no zip", 400),
        (zipped({}), 400),
        (zipped({**good, "../../evil": b"x"}), 400),
        (zipped({**good, "model.pkl": b"x"}), 400),
        (zipped({**good, "earnest_adapter.safetensors": b"torn"}), 400),
        (zipped({"adapter_config.json": b"[]", "adapter_model.safetensors": b""}), 400),
        (zipped({**good, "earnest_adapter.json": json.dumps({**meta, "variant": "os"}).encode()}), 400),
        (zipped({**good, "earnest_adapter.json": json.dumps({**meta, "settings": {"rank": 10**9}}).encode()}), 400),
    ]:
        found = upload(live, content)
        assert found.status_code == status, found.text
    assert NAME not in [a["name"] for a in live.get("/v1/adapters")["data"]]
    assert live.state.host.attached() == attached
    assert upload(live, zipped(good), lora_name="../../evil").status_code == 400


def test_in_place_the_old_one_answers_until_the_new_one_is_checked(live: Live, trained: Path) -> None:
    """What is no adapter replaces nothing; what is one replaces all of it, weights and folder."""
    good = files(trained)
    assert upload(live, zipped(good)).status_code == 200
    before, old = score(live, NAME), live.state.store.adapter(NAME)
    attached = live.state.host.attached()
    for bad in (zipped({**good, "earnest_adapter.safetensors": b"torn"}), b"no zip"):
        assert upload(live, bad, load_inplace=True).status_code == 400
        assert live.state.store.adapter(NAME) == old and score(live, NAME) == before
        assert live.state.host.attached() == attached
    policy = en.load("nano")
    adapter = en.load_adapter(policy, trained)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.mul_(0.5)
    other = adapter.save(trained.parent / "other", "nano")
    assert upload(live, zipped(files(other)), load_inplace=True).status_code == 200
    assert score(live, NAME) == pytest.approx(here(other), abs=1e-3) and abs(score(live, NAME) - before) > 0.01
    assert not live.state.store.version_folder(old.id, 1).exists() and live.chat(NAME)["adapter_version"] == 1
    assert f"{old.id}@1" not in live.state.host.attached()
    live.post(f"/v1/adapters/{NAME}/rollback", {"version": 0})
    assert upload(live, zipped(good)).status_code == 409, "rolled back is not unloaded"
    unload(live)


def test_a_small_zip_of_much_is_refused_by_what_it_holds() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_model.safetensors", b"\0" * 100_000)
    assert len(content.getvalue()) < 1000
    with pytest.raises(TooLarge, match="more than 99999 bytes"):
        unzipped(content.getvalue(), 99_999)
    assert len(unzipped(content.getvalue(), 100_000)["adapter_model.safetensors"]) == 100_000


def test_a_push_that_was_interrupted_never_answers_as_the_base(live: Live, trained: Path) -> None:
    """A server that died in the middle of a push knows the name without weights: it must not answer as the base."""
    live.state.store.create(NAME, {}, origin="pushed")
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    assert live.http.post("/v1/chat/completions", json=body).status_code == 404
    assert upload(live, zipped(files(trained))).status_code == 200
    assert live.chat(NAME)["adapter_version"] == 1
    unload(live)
