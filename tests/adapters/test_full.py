"""Full-parameter training: the same updates as torch on the model's own parameters, and the base as reference."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import earnest as en
from earnest.adapters import AdapterError, DoRA, Full, LoRA, attach, load_adapter, rows
from earnest.adapters.cases import tiny_gpt2
from earnest.adapters.conformance import perturb, tiny_llama
from earnest.adapters.whole import weight_files, write_merged
from earnest.engines import SGD, AdamW, LocalEngine, LogProbsWanted
from earnest.engines.optimizers import Optimizer
from earnest.errors import ConfigError, EarnestError, ObjectiveError
from earnest.guards import Directions, Erase
from earnest.objectives import SFT, SpectralCap
from earnest.proving import prove
from earnest.serve.host import Host
from earnest.serve.settings import ServeSettings
from earnest.signals import Batch, EMATeacher
from earnest.sync.base import SamplerEngine, Weights
from tests.engines.words import word_tokenizer

IDS = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(0))
DEMONSTRATIONS = Batch.from_rows([[5, 6, 7], [9, 8]], [[11, 12, 13], [14, 15]], role="demonstration")


def policy(make: Callable[[], nn.Module] = tiny_llama, dtype: torch.dtype = torch.float32) -> en.Policy:
    return en.Policy.of(make().to(dtype), word_tokenizer(64), name="tiny")


def engine_on(made: en.Policy, lr: float = 1e-3, **more: object) -> LocalEngine:
    return LocalEngine(made, attach(made, Full()), AdamW(lr=lr), max_grad_norm=None, **more)  # type: ignore[arg-type]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("make", "ours", "theirs"),
    [
        (tiny_llama, AdamW(lr=1e-3), partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)),
        # Not AdamW: the exact gradient of a bias of the keys is 0, and AdamW would scale its rounding errors up.
        (tiny_gpt2, SGD(lr=0.1, momentum=0.5), partial(torch.optim.SGD, lr=0.1, momentum=0.5)),
    ],
    ids=["llama", "gpt2"],
)
def test_the_updates_are_those_of_torch_on_the_models_own_parameters(
    make: Callable[[], nn.Module], ours: Optimizer, theirs: Callable[..., torch.optim.Optimizer]
) -> None:
    """Also of a tied embedding, of norms and of biases: three steps of supervised training."""
    made, plain = policy(make), make().eval()
    engine = LocalEngine(made, attach(made, Full()), ours, max_grad_norm=None)
    optimizer = theirs(plain.parameters())
    for _ in range(3):
        engine.step(DEMONSTRATIONS, SFT())
        batch = DEMONSTRATIONS
        chosen = plain(batch.inputs).logits[batch.row, batch.position]
        loss = nn.functional.cross_entropy(chosen, batch.token_target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad(), engine.adapter.merged():
        trained, before = dict(made.model.named_parameters()), dict(make().named_parameters())
        for name, want in plain.named_parameters():
            torch.testing.assert_close(trained[name], want, rtol=0, atol=2e-6, msg=name)
            assert not torch.equal(want, before[name]), name


def test_the_reference_is_the_base_and_does_not_move() -> None:
    engine = engine_on(policy(), lr=1e-2)
    before, base = engine.policy.fingerprint(), logits(engine.policy.model)
    reference = engine.score(DEMONSTRATIONS, LogProbsWanted(), "base")
    for _ in range(2):
        engine.step(DEMONSTRATIONS, SFT())
    assert torch.equal(engine.score(DEMONSTRATIONS, LogProbsWanted(), "base"), reference)  # type: ignore[arg-type]
    assert not torch.equal(engine.score(DEMONSTRATIONS, LogProbsWanted(), "live"), reference)  # type: ignore[arg-type]
    assert engine.policy.fingerprint(fresh=True) == before
    with engine.adapter.off():
        assert torch.equal(logits(engine.policy.model), base)


@pytest.mark.parametrize("broken", [False, True])
def test_the_audit_proves_the_step_and_finds_a_reference_that_moves(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(policy())
    real = LocalEngine.update

    def update(self: LocalEngine) -> object:
        with torch.no_grad():
            self.policy.model.model.norm._parameters["weight"].add_(1e-3)
        return real(self)

    if broken:
        monkeypatch.setattr(LocalEngine, "update", update)
    verdict = prove(engine, SFT(), DEMONSTRATIONS, quick=True)
    assert verdict.holds != broken
    assert [f.subject for f in verdict.failures if "frozen" not in f.subject] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_folder_is_a_model_and_an_adapter_on_its_base(dtype: torch.dtype, tmp_path: Path) -> None:
    """Read by transformers, by en.load and by load_adapter it has the bits of the trained policy."""
    made = policy(dtype=dtype)
    adapter = attach(made, Full())
    perturb(adapter)
    live = logits(made.model)
    adapter.save(tmp_path, "tiny")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert theirs.dtype == dtype and theirs.lm_head.weight is theirs.model.embed_tokens.weight
    with torch.no_grad(), adapter.merged():
        assert all(
            torch.equal(p, theirs.get_parameter(n)) for n, p in made.model.named_parameters() if "slots" not in n
        )
    if dtype == torch.float32:  # `.to(bfloat16)` also rounds the rotary frequencies, which a folder does not hold
        assert torch.equal(logits(theirs.eval()), live)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == made.tokenizer.get_vocab()
    names = {True: "bfloat16", False: "float32"}
    opened = en.load(tmp_path, dtype=names[dtype == torch.bfloat16])  # type: ignore[arg-type]
    assert torch.equal(opened.model.model.norm.weight, theirs.model.norm.weight)
    again = policy(dtype=dtype)
    loaded = load_adapter(again, tmp_path)
    assert loaded.variant == Full() and torch.equal(logits(again.model), live)
    with loaded.off():
        assert torch.equal(logits(again.model), logits(policy(dtype=dtype).model))


def test_a_changed_folder_and_another_base_are_refused(tmp_path: Path) -> None:
    made = policy()
    adapter = attach(made, Full())
    perturb(adapter)
    adapter.save(tmp_path)
    other = policy()
    with torch.no_grad():
        other.model.model.norm.weight.mul_(1.5)
    with pytest.raises(AdapterError, match="belongs to other base weights"):
        load_adapter(other, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v * 1.01 for k, v in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(AdapterError, match="is not the file that"):
        load_adapter(policy(), tmp_path)


def test_a_save_that_fails_leaves_no_description_of_the_files_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would name files that are half replaced."""

    def full_disk(*_: object) -> None:
        raise OSError("no space")

    adapter = attach(policy(), Full())
    perturb(adapter)
    adapter.save(tmp_path)
    assert (tmp_path / "earnest_adapter.json").exists()
    monkeypatch.setattr("earnest.adapters.files.write_merged", full_disk)
    with pytest.raises(OSError, match="no space"):
        adapter.save(tmp_path)
    assert not (tmp_path / "earnest_adapter.json").exists()


def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    first = engine_on(policy())
    first.step(DEMONSTRATIONS, SFT())
    first.save(tmp_path / "checkpoint")
    first.step(DEMONSTRATIONS, SFT())
    second = engine_on(policy())
    second.load(tmp_path / "checkpoint")
    second.step(DEMONSTRATIONS, SFT())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_samples_have_the_log_probs_of_the_trained_policy(dtype: torch.dtype) -> None:
    """Sampling merges in every dtype: a merged weight is the weight that is trained."""
    engine = engine_on(policy(dtype=dtype))
    perturb(engine.adapter)
    here = logits(engine.policy.model)
    with torch.no_grad(), engine.adapter.merged():
        assert torch.equal(logits(engine.policy.model), here)
    found = engine.sample([[5, 6, 7]], 4, en.SampleSpec(max_new_tokens=6, seed=1))
    batch = Batch.from_rows([r.prompt for r in found], [r.tokens for r in found])
    scored = engine.score(batch, LogProbsWanted())
    assert isinstance(scored, Tensor)
    sampled = torch.tensor([lp for r in found for lp in r.logprobs])
    torch.testing.assert_close(scored.float(), sampled, rtol=0, atol=1e-4 if dtype == torch.float32 else 2e-2)


def test_an_average_teacher_has_the_averaged_weights() -> None:
    """The teacher equals a model whose parameters are base + averaged offsets, the tied head included."""
    made = policy()
    adapter = attach(made, Full())
    teacher = EMATeacher(adapter, rate=0.25)
    engine = LocalEngine(made, adapter, AdamW(lr=1e-2), outer=teacher)
    for _ in range(3):
        engine.step(DEMONSTRATIONS, SFT())
    want = tiny_llama().eval()
    with torch.no_grad():
        for name, p in want.named_parameters():
            p.add_(teacher.state[name])
    live = logits(made.model)
    with teacher.installed(), adapter.off():
        torch.testing.assert_close(logits(made.model), logits(want), rtol=0, atol=1e-5)
    assert torch.equal(logits(made.model), live) and not torch.allclose(live, logits(want), atol=1e-3)


def test_a_guard_removes_its_direction_from_the_update() -> None:
    plain = engine_on(policy())
    name = "model.norm.weight"
    direction = torch.zeros(1, 32)
    direction[0, 3] = 1.0
    guard = Erase(Directions({name: direction}, {name: torch.ones(1)}), gate="two_sided")
    engine = engine_on(policy(), guard=guard)
    for e in (plain, engine):
        e.step(DEMONSTRATIONS, SFT())
    ours, free = (e.adapter.named_parameters()[name].detach() for e in (engine, plain))
    assert float(free[3].abs()) > 1e-4 and float(ours[3].abs()) < 1e-9
    assert torch.equal(ours[4:], free[4:])


def test_targets_layers_embeddings_and_head() -> None:
    made = policy(untied)
    some = attach(made, Full(), targets=["mlp"], layers=[-1])
    assert set(some.slots) == {f"model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")}
    some.detach()
    body = attach(made, Full(embeddings=False, head=False))
    assert "model.norm" in body.slots and not {"lm_head", "model.embed_tokens"} & set(body.slots)
    body.detach()
    everything = attach(made, Full())
    assert everything.report.trainable == made.parameters


def untied() -> nn.Module:
    model = tiny_llama()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def refusals() -> dict[str, tuple[Callable[[Path], object], str]]:
    def stacked(_: Path) -> object:
        model = tiny_llama()
        attach(model, DoRA(rank=2))
        return attach(model, Full())

    def mixed_rows(_: Path) -> object:
        model = tiny_llama().eval()
        adapter = attach(model, Full())
        with rows(model, [adapter, None, None]):
            return logits(model)

    def spectral(_: Path) -> object:
        return engine_on(policy()).step(DEMONSTRATIONS, SFT() + SpectralCap())

    def exported(folder: Path) -> object:
        return attach(tiny_llama(), Full()).export_lora(folder)

    def at_scale_zero(folder: Path) -> object:
        adapter = attach(tiny_llama(), Full())
        adapter.scale = 0.0
        return adapter.save(folder)

    return {
        "one half of a tied pair": (lambda _: attach(tiny_llama(), Full(head=False)), "ties both into one weight"),
        "the tied half by name": (lambda _: attach(tiny_llama(), Full(), targets=["lm_head"]), "tied to another"),
        "a name that is not there": (lambda _: attach(tiny_llama(), Full(), targets=["mpl"]), "matches no module with"),
        "on top of DoRA": (stacked, "cannot be stacked"),
        "single rows": (mixed_rows, "for the whole batch"),
        "a spectral norm of a norm's weight": (spectral, "needs linear layers"),
        "as a LoRA": (exported, "it trains the weights themselves"),
        "saving the base": (at_scale_zero, "would be the base"),
    }


@pytest.mark.parametrize("what", refusals())
def test_what_has_no_meaning_is_refused_with_the_reason(what: str, tmp_path: Path) -> None:
    act, message = refusals()[what]
    with pytest.raises((AdapterError, ObjectiveError), match=message):
        act(tmp_path)


def test_a_deep_copy_trains_its_own_offsets() -> None:
    model = tiny_llama().eval()
    attach(model, Full())
    twin = copy.deepcopy(model)
    here = logits(model)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if p.requires_grad:
                assert "earnest_slots" in name
                p.add_(0.1)
    assert not torch.equal(logits(twin), here) and torch.equal(logits(model), here)
    assert twin.lm_head.weight is not model.lm_head.weight


def test_lora_on_top_of_trained_weights_and_a_stack_that_merges() -> None:
    model = tiny_llama().eval()
    full = attach(model, Full())
    perturb(full)
    full.freeze()
    top = attach(model, LoRA(2), targets=["q_proj", "v_proj"], name="top")
    perturb(top)
    both = logits(model)
    with torch.no_grad(), top.merged():
        torch.testing.assert_close(logits(model), both, rtol=0, atol=1e-4)
    top.detach()
    full.detach()
    assert torch.equal(logits(model), logits(tiny_llama().eval()))


def test_the_settings_are_in_the_folder(tmp_path: Path) -> None:
    adapter = attach(policy(untied), Full(embeddings=False), targets=["mlp", "lm_head"])
    adapter.save(tmp_path, "some/model")
    meta = json.loads((tmp_path / "earnest_adapter.json").read_text())
    assert meta["variant"] == "full" and meta["settings"] == {"embeddings": False, "head": True}
    assert meta["base_model"] == "some/model" and meta["targets"] == ["mlp", "lm_head"]


def test_a_server_that_mixes_adapters_refuses_whole_modules() -> None:
    host = Host(ServeSettings())
    host.start()
    try:
        host.wait()
        with pytest.raises(EarnestError, match="trains whole modules"):
            host.attach("all", Full())
        with pytest.raises(EarnestError, match="trains whole modules"):
            host.attach("head", LoRA(2), modules_to_save=["lm_head"])
        assert host.attached() == () and not any("slots" in n for n, _ in host.policy.model.named_modules())
    finally:
        host.close()
    with pytest.raises(ConfigError, match="beside its weights"):
        Weights.of(engine_on(policy())).files(plain=False)


def test_pushed_weights_make_the_same_policy_elsewhere() -> None:
    """What Ray and bucket samplers do: their own base and the trainer's offsets."""
    trainer, elsewhere = engine_on(policy()), SamplerEngine(engine_on(policy()))
    trainer.step(DEMONSTRATIONS, SFT())
    weights = Weights.of(trainer)
    elsewhere.push(weights.version, weights.state)
    rows_ = [[5, 6, 7, 8], [9, 10, 11]]
    batch = Batch.from_rows([r[:1] for r in rows_], [r[1:] for r in rows_])
    want = trainer.score(batch, LogProbsWanted())
    assert isinstance(want, Tensor) and elsewhere.score(rows_) == [float(x) for x in want]


def test_weights_of_an_earlier_save_are_removed(tmp_path: Path) -> None:
    """An index that stays would make loaders look for shards that are not there, or read old ones."""
    made = policy()
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    write_merged(attach(made, Full()), tmp_path)
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
