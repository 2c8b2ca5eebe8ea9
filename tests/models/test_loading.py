"""``en.load``: what it loads, and the error for everything that it refuses. No network is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as tf

from earnest.errors import ConfigError, EarnestError, UnknownModel, UnusableModel
from earnest.models import SampleSpec, list_models, load, places, sample
from earnest.models.loading import load_config
from tests.models import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "tiny-llama"
    tiny.model().save_pretrained(out)
    tiny.tokenizer().save_pretrained(out)
    return out


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_the_model_that_was_saved(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = load(folder)
    assert not any(p.requires_grad for p in policy.model.parameters())
    assert not any(m.training for m in policy.model.modules())
    assert policy.fingerprint() == tiny.policy().fingerprint()
    ids = policy.render([{"role": "user", "content": "hi"}])
    assert sample(policy, [ids], 2, SampleSpec()) == sample(tiny.policy(), [ids], 2, SampleSpec())
    assert (policy.name, policy.version) == (str(folder), "local folder")
    assert capfd.readouterr() == ("", "")


def test_relative_and_home_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert load("./tiny-llama").parameters == load(folder).parameters
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load("~/tiny-llama").name.endswith("tiny-llama")


def test_a_folders_config_names_no_version(folder: Path) -> None:
    """A model merged from nano and an adapter keeps nano's config; its weights are not nano's."""
    edit_config(folder, earnest_version="nano-1")
    assert load(folder).version == "local folder"
    assert load("nano").version == "nano-1"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_as_given(folder: Path, dtype: str) -> None:
    policy = load(folder, dtype=dtype)  # type: ignore[arg-type]
    assert {p.dtype for p in policy.model.parameters()} == {getattr(torch, dtype)} == {policy.dtype}
    assert f"{dtype} on cpu" in policy.describe()


def test_auto_is_float32_on_a_cpu_also_for_a_16_bit_checkpoint(tmp_path: Path) -> None:
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").dtype == torch.float32


class TestDevice:
    """CUDA and MPS are not on the machines that run these tests: the choice is tested, not the devices."""

    @pytest.mark.parametrize(
        ("cuda", "mps", "want"),
        [(True, True, "cuda"), (False, True, "mps"), (True, False, "cuda"), (False, False, "cpu")],
    )
    def test_cuda_before_mps_before_cpu(
        self, monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, want: str
    ) -> None:
        from earnest.models.device import choose_device, choose_dtype

        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        device, why = choose_device("auto")
        assert device.type == want
        assert why
        assert choose_dtype("auto", device) == (None if want == "cuda" else torch.float32)

    def test_a_device_that_is_not_here(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="'cuda' is not on this machine; use auto, or one of cpu"):
            load(folder, device="cuda")
        with pytest.raises(ConfigError, match="device 'gpu' is not a device"):
            load(folder, device="gpu")

    def test_a_gpu_that_is_one_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from earnest.models.device import choose_device

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert choose_device("cuda:1")[0] == torch.device("cuda:1")
        with pytest.raises(ConfigError, match="'cuda:2' is not on this machine"):
            choose_device("cuda:2")

    def test_an_unknown_dtype(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="dtype 'bfloat61' is not known; did you mean 'bfloat16'"):
            load(folder, dtype="bfloat61")  # type: ignore[arg-type]

    def test_the_reason_for_the_device_is_reported(self, folder: Path) -> None:
        assert "no CUDA or MPS device here" in load(folder).describe()


class TestRefused:
    def test_no_such_folder(self) -> None:
        with pytest.raises(UnknownModel, match=r"There is no folder './nowhere'; .*nano, smollm2"):
            load("./nowhere")

    def test_a_file(self, folder: Path) -> None:
        with pytest.raises(UnknownModel, match="is a file; give the folder"):
            load(folder / "config.json")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(UnusableModel, match=r"has no config\.json.*save_pretrained"):
            load(tmp_path)

    def test_a_run_and_its_adapter(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        (run / "adapter").mkdir(parents=True)
        (run / "adapter" / "adapter_config.json").write_text("{}")
        # The first adapter belongs to no run: run.json is written after it.
        for given, exported in ((run / "adapter", run / "adapter"), (run, run), (run / "adapter", run)):
            with pytest.raises(UnusableModel) as refused:
                load(given)
            assert f"`earnest export {exported}`" in str(refused.value) and "en.load_adapter" in str(refused.value)
            assert f"model={exported / 'export' / 'merged'} " in str(refused.value)
            (run / "run.json").write_text("{}")

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_a_broken_config(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        with pytest.raises(UnusableModel, match=r"config\.json is not"):
            load(folder)

    def test_pickled_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(UnusableModel, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
            load(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(UnusableModel, match=r"no weights \(no model\*\.safetensors\)"):
            load(folder)

    def test_torn_weights(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(UnusableModel, match="cannot be loaded"):
            load(folder)

    def test_another_kind_of_model(self, tmp_path: Path) -> None:
        config = tf.T5Config(vocab_size=30, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
        tf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
        with pytest.raises(UnusableModel, match="model_type 't5', which is not a causal LM"):
            load(tmp_path)

    def test_a_body_without_its_head(self, tmp_path: Path) -> None:
        tiny.model("llama_untied").model.save_pretrained(tmp_path)
        with pytest.raises(UnusableModel, match="holds a LlamaModel, not a causal LM"):
            load(tmp_path)

    def test_missing_tensors_are_not_random_numbers(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UnusableModel, match=r"lack 1 tensors .*model\.layers\.1\.mlp\.up_proj\.weight.*random"):
            load(folder)

    def test_a_tensor_of_another_shape(self, folder: Path) -> None:
        edit_config(folder, intermediate_size=40)
        with pytest.raises(UnusableModel):
            load(folder)

    def test_unused_tensors_give_a_note(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors") | {"score.weight": torch.ones(2)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert "1 tensors of the file are unused (first: score.weight)" in load(folder).describe()

    def test_another_models_tokenizer(self, folder: Path) -> None:
        tokenizer = tiny.tokenizer()
        tokenizer.add_tokens(["extra"])
        tokenizer.save_pretrained(folder)
        with pytest.raises(UnusableModel, match=f"ids up to {tiny.V}, the model's embedding only {tiny.V} rows"):
            load(folder)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        tiny.model().save_pretrained(tmp_path)
        with pytest.raises(UnusableModel, match="cannot be loaded"):
            load(tmp_path)

    @pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
    def test_an_empty_tokenizer_is_refused(self, kind: str, tmp_path: Path) -> None:
        """Some tokenizer classes load from a folder without tokenizer files, and encode every text as no tokens."""
        tiny.model(kind).save_pretrained(tmp_path)
        with pytest.raises(UnusableModel, match=r"no usable tokenizer|cannot be loaded"):
            load(tmp_path)

    def test_code_of_its_own_is_never_run(self, folder: Path, tmp_path: Path) -> None:
        proof = tmp_path / "it-ran"
        (folder / "modeling_evil.py").write_text(f"open({str(proof)!r}, 'w')")
        names = {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
        edit_config(folder, model_type="evil", auto_map=names)
        with pytest.raises(UnusableModel, match="its own Python code"):
            load(folder)
        edit_config(folder, model_type="llama")  # one that transformers has: its own class is used
        assert load(folder).parameters == tiny.policy().parameters
        assert not proof.exists()

    def test_each_is_a_value_error(self) -> None:
        for error in (UnknownModel, UnusableModel):
            assert issubclass(error, EarnestError)
            assert issubclass(error, ValueError)


class Hub:
    """A fake hub: ``model_info`` answers or raises; ``snapshot_download`` gives the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any, folder: Path | None) -> None:
        self.asked: list[Any] = []

        def model_info(_: Any, name: str, **kwargs: Any) -> Any:
            self.asked.append((name, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        def snapshot_download(name: str, *, local_files_only: bool = False, **kwargs: Any) -> str:
            self.asked.append((name, local_files_only, kwargs))
            if folder is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
            return str(folder)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def info(*names: str) -> Any:
    siblings = [type("F", (), {"rfilename": n}) for n in names]
    return type("Info", (), {"sha": "abc123", "siblings": siblings})


def response(status: int) -> Any:
    import httpx

    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


class TestHub:
    def test_an_id_is_its_snapshot_at_one_revision(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        hub = Hub(monkeypatch, info("config.json", "model.safetensors"), folder)
        policy = load("org/tiny")
        assert (policy.name, policy.version) == ("org/tiny", "abc123")
        assert hub.asked[1][2]["revision"] == "abc123"
        assert not any(
            pattern.endswith((".bin", "*")) and "token" not in pattern for pattern in hub.asked[1][2]["allow_patterns"]
        )

    def test_pickles_are_refused_before_any_download(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = Hub(monkeypatch, info("config.json", "pytorch_model.bin"), None)
        with pytest.raises(UnusableModel, match=r"pytorch_model\.bin, a pickle"):
            load("org/old")
        assert len(hub.asked) == 1

    def test_no_network_and_nothing_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = Hub(monkeypatch, ConnectionError("no route"), None)
        with pytest.raises(
            UnknownModel, match=r"'nanoo' is not a folder .*cannot be reached \(ConnectionError\).*did you mean 'nano'"
        ):
            load("nanoo")
        assert len(hub.asked) == 2  # asked once: no retries
        with pytest.raises(UnknownModel, match=r"'nanoo' is not a folder .*did you mean 'nano'"):
            load_config("nanoo")
        assert len(hub.asked) == 4

    def test_no_network_but_cached(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        Hub(monkeypatch, ConnectionError("no route"), folder)
        policy = load("org/tiny")
        assert policy.version == folder.name
        assert "hub not reached (ConnectionError): cached snapshot used" in policy.describe()

    def test_unknown_and_gated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Hub(monkeypatch, huggingface_hub.errors.RepositoryNotFoundError("404", response=response(404)), None)
        with pytest.raises(UnknownModel, match=r"Hugging Face has no model 'org/none'.*built in: nano, smollm2"):
            load("org/none")
        Hub(monkeypatch, huggingface_hub.errors.GatedRepoError("403", response=response(403)), None)
        with pytest.raises(UnknownModel, match="is gated: accept its terms"):
            load("org/closed")

    @pytest.mark.parametrize("name", ["", "a/b/c", "../x", "with space", "-x/y"])
    def test_names_that_cannot_be_ids_are_not_requested_from_the_hub(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        hub = Hub(monkeypatch, info(), None)
        with pytest.raises(EarnestError):
            load(name)
        assert not hub.asked


def test_parameters_are_counted_from_the_headers(folder: Path) -> None:
    assert places.count_parameters(folder) == tiny.policy().parameters


def test_list_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EARNEST_CACHE", str(tmp_path))
    models = {m.name: m for m in list_models()}
    assert list(models) == ["nano", "smollm2"]
    assert not models["smollm2"].offline
    assert models["smollm2"].where.startswith(str(tmp_path))
    assert {m.licence for m in models.values()} == {"Apache-2.0"}
    assert models["nano"].parameters <= 2_000_000


def test_importing_and_listing_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, earnest.models as m; m.list_models(); m.ModelInfo\n"
        "bad = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules); assert not bad, bad\n"
        "m.Policy, m.SampleSpec, m.load\n"
        "bad = {'transformers', 'huggingface_hub'} & set(sys.modules); assert not bad, bad\n"
        "assert set(m.__all__) <= set(dir(m))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_nano_is_embedded_and_obeys_the_laws() -> None:
    policy = load("nano")
    assert policy.name == "nano"
    assert policy.version == (places.nano_folder() / "VERSION").read_text().strip()
    assert policy.cache_kind == "buffered"
    assert policy.head.tied
    assert policy.pad_id not in policy.eos_ids
    entry = next(m for m in list_models() if m.name == "nano")
    assert entry.offline
    assert entry.parameters == policy.parameters
    prompts = [
        policy.render([{"role": "user", "content": text}]) for text in ("say hello", "sort 3 1 2", "what is 4 + 5?")
    ]
    out = sample(policy, prompts, 3, SampleSpec(max_new_tokens=12, temperature=0.8, seed=1))
    assert any(c.finish == "stop" for c in out)
    for c in out:
        ids = torch.tensor([[*prompts[c.prompt_index], *c.tokens]])
        with torch.no_grad():
            logp = (policy.model(ids).logits[0, len(prompts[c.prompt_index]) - 1 : -1] / 0.8).log_softmax(-1)
        assert c.logprobs == pytest.approx(logp.gather(-1, torch.tensor(c.tokens)[:, None])[:, 0].tolist(), abs=1e-4)
