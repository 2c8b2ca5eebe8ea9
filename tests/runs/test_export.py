"""`earnest export`: what other programs read has the logits of the run's policy, and a broken export is not written."""

from __future__ import annotations

import base64
import dataclasses
import json
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import earnest as en
from earnest import cli
from earnest.adapters.conformance import perturb
from earnest.adapters.trained import load_trained
from earnest.config import load_file
from earnest.errors import EarnestError
from earnest.report.load import load as load_run
from earnest.runs import export as module
from earnest.runs import start
from tests.report import folders
from tests.runs.tiny import recipe

IDS = torch.arange(7, 19)[None]


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Do not write into it."""
    place = tmp_path_factory.mktemp("trained")
    settings = [f"out={place / 'run'}", "steps=2", "chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"]
    return start("test", load_file(recipe(place / "r.yaml", tiny), settings), Console(quiet=True)).folder


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(IDS).logits


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", *arguments])
    return int(stop.value.code or 0)


def test_the_merged_folder_is_the_policy_for_transformers(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert command(str(trained), "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert "largest difference of the logits" in printed and "prompts of the run" in printed
    policy, adapter = load_trained(trained)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(theirs), logits(policy.model), rtol=0, atol=1e-4)
    with adapter.off():
        assert not torch.allclose(logits(theirs), logits(policy.model), atol=1e-3)
    assert AutoTokenizer.from_pretrained(out).chat_template == policy.tokenizer.chat_template
    assert "m.content" in str(policy.tokenizer.chat_template)
    assert (out / "generation_config.json").is_file()
    record = json.loads((trained / "run.json").read_text())
    page = (out / "README.md").read_text()
    assert record["objective"] in page and "checks of the training step" in page and "held-out reward" in page


@pytest.mark.parametrize("form", ["peft", "lora"])
def test_the_adapters_are_the_policy_for_peft(form: str, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / form
    assert command(str(trained), "--as", form, "--out", str(out)) == 0
    policy, _ = load_trained(trained)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Ff]ound missing adapter keys.*")
        base = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out))
    torch.testing.assert_close(logits(theirs), logits(policy.model), rtol=0, atol=1e-4)
    assert not (out / "earnest_adapter.json").exists() and (out / "README.md").is_file()


def test_an_embedding_and_a_head_that_are_no_longer_tied(tmp_path: Path) -> None:
    """The base ties them; the exported config does not, or transformers would drop one of the two."""
    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=2), modules_to_save=["embed_tokens"])
    perturb(adapter)
    adapter.save(tmp_path / "adapter", "nano")
    done = en.export(tmp_path / "adapter", tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(done.folder)
    assert not theirs.config.tie_word_embeddings and policy.model.config.tie_word_embeddings
    torch.testing.assert_close(logits(theirs), logits(policy.model), rtol=0, atol=1e-3)
    assert done.difference < 1e-3 < done.base_difference and "fixed prompts" in str(done)


def test_training_rows_among_the_samples_are_not_compared_on(tmp_path: Path) -> None:
    """A run on the user's own rows has few held-out samples, and training rows, whose prompt is empty."""
    run = load_run(folders.make(tmp_path / "run"))
    own, asked = run.samples[0].model_copy(update={"prompt": (), "prompt_id": "training row 1"}), run.samples[0]
    rows, what = module._rows(en.load("nano"), dataclasses.replace(run, samples=(own, asked)))
    assert len(rows) == 1 and what == "prompts of the run"


def test_all_weights_are_exported_bit_for_bit(tmp_path: Path) -> None:
    policy = en.load("nano")
    adapter = en.attach(policy, en.Full(), targets=["mlp", "embed_tokens"])
    perturb(adapter, std=0.01)
    adapter.save(tmp_path / "adapter", "nano")
    done = en.export(tmp_path / "adapter", tmp_path / "merged")
    assert done.difference == 0 < done.base_difference
    with pytest.raises(EarnestError, match="export as merged"):
        en.export(tmp_path / "adapter", tmp_path / "peft", form="peft")
    assert not (tmp_path / "peft").exists()


def test_a_broken_export_is_not_written(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's weights instead of the merged ones: a folder that loads, and is not the policy."""

    def base_only(adapter: en.Adapter, folder: Path) -> None:
        with adapter.off():
            write(adapter, folder)

    write = module.write_merged
    monkeypatch.setattr(module, "write_merged", base_only)
    with pytest.raises(EarnestError, match="is not the trained one"):
        en.export(trained, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--as", "gguf"], "give one of merged, peft, lora"),
        (["{run}", "--out", "{run}"], "exists already"),
        (["{tmp}"], "is not an adapter folder"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*(a.format(run=trained, tmp=tmp_path) for a in arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out and "Traceback" not in captured.err


def test_a_push_that_fails_leaves_the_folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with pytest.raises(EarnestError, match="is written and compared, but was not pushed to me/mine"):
        en.export(trained, tmp_path / "merged", push="me/mine")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that an upload of small files uses; keeps the files of each repository."""

    repositories: dict[str, dict[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, Any] = {}
        if self.headers["Authorization"] != "Bearer hf_mine":
            self.send_error(401)
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            assert asked.get("private") or asked.get("visibility") == "private"
            self.repositories[f"{asked['organization']}/{asked['name']}"] = {}
            answer = {"url": f"http://{self.headers['Host']}/{asked['organization']}/{asked['name']}"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").split("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/1", "commitOid": "1"}
        sent = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def test_a_push_uploads_the_whole_folder_as_a_private_repository(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub.repositories = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        done = en.export(trained, tmp_path / "merged", push="me/mine")
        server.shutdown()
    assert str(done.address).endswith("/me/mine")
    folder = tmp_path / "merged"
    written = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert Hub.repositories == {"me/mine": written}
    assert {"model.safetensors", "config.json", "README.md"} <= written.keys()
