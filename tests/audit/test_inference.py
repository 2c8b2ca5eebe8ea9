"""Roles that are guessed by perturbation: right on the four families, printed as guesses, and never from names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step, StepError, audit, infer
from earnest_audit.laws import pairs
from tests.audit.steps import STEPS, Tiny, grpo_loss, logprobs, policy_batch, policy_step, sft_step


def renamed(step: Step) -> tuple[Any, dict[str, Tensor], dict[str, str]]:
    """The step's loss on a batch whose keys are meaningless and in another order, and key -> declared role."""
    names = {key: f"k{number}" for number, key in enumerate(sorted(step.batch, reverse=True))}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return step.loss(model, {key: batch[name] for key, name in names.items()}, **step.knobs)

    return loss, {names[key]: step.batch[key] for key in names}, {names[key]: role for role, key in step.roles.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", STEPS)
def test_every_role_of_the_families_is_found_without_names(family: str, dtype: torch.dtype) -> None:
    step = STEPS[family](dtype=dtype)
    loss, batch, truth = renamed(step)
    inferred = infer(step.model, loss, batch)
    found = {key: role for role, key in inferred.roles.items()}
    assert {key: found.get(key) for key in truth} == truth, "\n".join(map(str, inferred.inferred))


def test_audit_of_a_model_prints_its_guesses_and_checks_what_follows() -> None:
    step = policy_step()
    loss, batch, truth = renamed(step)
    right = audit(step.model, loss, batch, quick=True)
    assert right.holds and sum(note.startswith("guessed: ") for note in right.notes) == len(batch), str(right)

    def wrong(model: nn.Module, changed: Mapping[str, Any]) -> Any:
        """The mask is read and the mean is over the padded width."""
        value, metrics = loss(model, changed)
        mask = changed[next(key for key, role in truth.items() if role == "mask")]
        return value * mask.sum() / mask.numel(), metrics

    assert "MI" in {f.law for f in audit(step.model, wrong, batch).failures}


def test_settings_in_the_signature_of_the_loss_are_offered() -> None:
    step = policy_step()

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float = 0.2, name: str = "a", hard: bool = True) -> Any:
        return step.loss(model, batch, **{**step.knobs, "clip": clip})

    found = audit(step.model, loss, step.batch)
    assert "the loss has settings that are not declared: settings={'clip': 0.2} declares them" in found.notes
    assert [f.outcome for f in found.findings if f.law == "PG-CLIP"] == ["not declared"]
    assert str(found).endswith(f"{found.summary}\n")
    assert found.summary.startswith(f"{found.counts['holds']} hold, 0 fail,")
    declared = audit(step.model, loss, step.batch, quick=True, settings={"clip": 0.2})
    assert not any("settings that are not declared" in note for note in declared.notes)


def test_a_declared_role_is_not_guessed_again() -> None:
    step = policy_step()
    loss, batch, truth = renamed(step)
    keys = {role: key for key, role in truth.items()}
    inferred = infer(step.model, loss, batch, roles={"reference": keys["behaviour"]})
    assert inferred.roles["reference"] == keys["behaviour"]
    assert keys["behaviour"] not in {guess.key for guess in inferred.inferred}


def test_rewards_and_weights_and_unread_tensors() -> None:
    model = Tiny()
    batch = policy_batch(model) | {"unread": torch.randn(5), "weights": torch.rand(5) + 2.0}
    batch["rewards"] = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0])
    batch["group"] = torch.tensor([3, 3, 3, 5, 5])
    del batch["advantages"]

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        rewards, group = batch["rewards"], batch["group"]
        same = (group[:, None] == group).float()
        advantages = rewards - same @ rewards / same.sum(1)
        return grpo_loss(model, {**batch, "advantages": advantages * batch["weights"]}, 0.04, 0.2)

    inferred = infer(model, loss, batch)
    guesses = {guess.key: guess for guess in inferred.inferred}
    assert guesses["rewards"].role == "rewards" and guesses["group"].role == "group"
    assert guesses["weights"].role == "weights" and "unread" not in guesses
    assert guesses["old"].role == "behaviour" and guesses["ref"].role == "reference"
    assert "no role was found for unread" in inferred.remarks
    assert any(remark.startswith("guessed: rewards is rewards (sure: a constant added") for remark in inferred.remarks)


def test_the_model_and_the_batch_are_left_alone() -> None:
    step = policy_step()
    loss, batch, _ = renamed(step)
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    kept = {key: t.clone() for key, t in batch.items()}
    infer(step.model, loss, batch)
    assert all(p.equal(before[n]) and p.grad is None for n, p in step.model.named_parameters())
    assert all(t.equal(kept[key]) for key, t in batch.items())
    assert not any(m._forward_hooks for m in step.model.modules())


@pytest.mark.parametrize(("family", "law"), [("sft", "NLL"), ("policy gradient", "PG-ONPOLICY")])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_flipped_sign_is_seen_without_a_function_for_log_probs(family: str, law: str, sign: int) -> None:
    """The log-probs are read from the logits that the model computes while the loss runs."""
    step = STEPS[family]()
    loss, batch, _ = renamed(step)
    verdict = audit(step.model, lambda model, changed: sign * loss(model, changed)[0], batch)
    rows = [f for f in verdict.findings if f.law == law and "cosine" in f.measured]
    assert [f.outcome for f in rows] == ["holds" if sign > 0 else "fails"], str(verdict)
    assert not verdict.failures or sign < 0, str(verdict)


def test_labels_of_minus_one_are_ignored_labels() -> None:
    """nanochat's: they count as not supervised, and the verdict prints the guess."""
    step = sft_step()
    labels = step.batch["labels"]
    batch = {**step.batch, "labels": torch.where(labels == -100, -1, labels)}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-1)

    verdict = audit(step.model, loss, batch)
    assert verdict.holds, str(verdict)
    assert any("labels is labels (likely" in n and "-1 marks what is not supervised" in n for n in verdict.notes)
    share = next(f for f in verdict.findings if f.subject == "supervised share")
    assert share.outcome == "holds" and not share.measured.startswith("100 %"), share.measured


def test_wrong_calls_have_a_way_out() -> None:
    step = policy_step()
    with pytest.raises(StepError, match="'logprob' is not a declaration of a step: did you mean 'logprobs'"):
        audit(step.model, step.loss, step.batch, logprob=logprobs)
    with pytest.raises(StepError, match="the batch is a tuple: give a dict of tensors"):
        audit(step.model, step.loss, (step.batch["ids"],))  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"a model alone cannot be audited: give audit\(model, loss, batch\)"):
        audit(step.model)
    with pytest.raises(
        StepError, match=r"audit\(Step\(…\)\) takes nothing beside the Step: give the loss and the batch to Step"
    ):
        audit(step, logprobs)
    with pytest.raises(StepError, match=r"give clip_low, final to Step\(…\)"):
        audit(step, clip_low=0.2, final=1)


def test_the_way_out_of_a_guess_is_named_where_there_was_one() -> None:
    step = sft_step()
    for roles in ({}, step.roles):
        notes = infer(step.model, step.loss, step.batch, roles=roles).remarks
        assert any("instead of guessing" in note for note in notes) == (not roles)


class Placed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(12, 16)

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        shown = torch.ones_like(ids) if attention is None else attention
        places: Tensor = self.places((shown.cumsum(-1) - 1).clamp(min=0))
        return super().forward(ids, attention, documents) + self.head(places)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("right", [True, False])
def test_each_answers_attention_is_found_in_whichever_calls(right: bool, together: bool) -> None:
    """Positions that are counted from the attention are embedded in a call that the ids do not reach."""
    step = STEPS["preference"]()
    model, sides = Placed(), ("chosen", "rejected")
    step.batch["rejected_attention"][:2, 5:] = 0
    step.batch["rejected_mask"][:2, 4:] = 0

    def loss(_: nn.Module, batch: Mapping[str, Any]) -> Any:
        b = {**batch, "chosen_attention": batch["a"], "rejected_attention": batch["b"]}
        if not together:
            sums = [(logprobs(model, {"ids": b[s], "attention": b[f"{s}_attention"]}) * b[f"{s}_mask"]).sum(-1)
                    for s in sides]  # fmt: skip
        else:
            ids, shown, mask = (torch.cat([b[s + end] for s in sides]) for end in ("", "_attention", "_mask"))
            sums = list((logprobs(model, {"ids": ids, "attention": shown}) * mask).sum(-1).chunk(2))
        gap = sums[0] - b["ref_chosen"] - (1.0 if right else 0.95) * (sums[1] - b["ref_rejected"])
        return -F.logsigmoid(0.1 * gap).mean()

    names = {"chosen_attention": "a", "rejected_attention": "b"}
    verdict = audit(model, loss, {names.get(k, k): v for k, v in step.batch.items()}, laws=[pairs.LAW],
                    pairwise=True)  # fmt: skip
    guesses = {note.partition(" (")[0] for note in verdict.notes}
    assert guesses >= {f"guessed: {k} is {role}" for role, k in names.items()}
    (row,) = [f for f in verdict.findings if f.subject == "identical pairs"]
    assert row.outcome == ("holds" if right else "fails"), str(verdict)


V, D = 23, 12


class Causal(nn.Module):
    """A causal mean over embedded tokens."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids: Tensor, attention: Tensor | None = None) -> Tensor:
        shown = torch.ones_like(ids) if attention is None else attention
        x = self.embed(ids) * shown[..., None]
        return self.head(torch.tanh(x + x.cumsum(1) / shown.cumsum(1).clamp(min=1)[..., None]))


def draw(*shape: int, high: int = 0, seed: int = 3) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1, high, shape, generator=rng) if high else torch.randn(*shape, generator=rng)


def net(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def answers() -> dict[str, Tensor]:
    """Ragged rows with prompts of three tokens; labels are -100 outside of the answers."""
    lengths = torch.tensor([10, 7, 8, 6])[:, None]
    place = torch.arange(10)[None]
    shown = (place < lengths).long()
    ids = draw(4, 10, high=V) * shown
    return {"ids": ids, "attention": shown, "labels": torch.where((place >= 3) & (shown == 1), ids, -100)}


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def marked(model: nn.Module, batch: Mapping[str, Any], shift: int = 1) -> Tensor:
    """SFT whose labels only mark the places; the targets are the ids."""
    on = (batch["labels"] != -100)[:, shift : shift + 9].float()
    logits = model(batch["ids"], batch["attention"])[:, :-1].transpose(1, 2)
    return (F.cross_entropy(logits, batch["ids"][:, 1:], reduction="none") * on).sum() / on.sum().clamp(min=1)


def sft(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return nll(model(batch["ids"], batch["attention"])[:, :-1], batch["labels"][:, 1:])


def xy() -> dict[str, Tensor]:
    text = draw(4, 10, high=V)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def actor_critic(model: Any, batch: Mapping[str, Any]) -> Tensor:
    logp, value = model["p"](batch["obs"]).log_softmax(-1), model["v"](batch["obs"])[..., 0]
    taken = logp.gather(-1, batch["act"][..., None])[..., 0]
    return -(taken * (batch["ret"] - value).detach()).mean() + 0.5 * (batch["ret"] - value).square().mean()


def contrast(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    a, b = (F.normalize(model(batch[k]), dim=-1) for k in ("a", "b"))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def time_first(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return nll(model(batch["x"].T), batch["y"].T)


def pair_loss(model: nn.Module, batch: Mapping[str, Any], tilt: float = 1.0) -> tuple[Tensor, Tensor]:
    lp = [-F.cross_entropy(model(batch[k])[:, :-1].transpose(1, 2), batch[k][:, 1:], reduction="none").mean(-1)
          for k in ("c", "r")]  # fmt: skip
    return -F.logsigmoid(lp[0] - tilt * lp[1]).mean(), -lp[0].mean()


def orpo(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    pair, likelihood = pair_loss(model, batch)
    return pair + 0.5 * likelihood


def weighed(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["w"])


def masked(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    off = (model(batch["x"])[..., 0] - batch["t"]).square() * batch["m"]
    return off.sum() / batch["m"].sum().clamp(min=1)


def bce(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"].float())


def ce(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"].long())


def ctc(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    assert bool((batch["y"] >= 0).all()), "a label was written that is neither declared nor present"
    return F.ctc_loss(model(batch["x"]).log_softmax(-1).transpose(0, 1), batch["y"], batch["n"], batch["k"])


Case = tuple[nn.Module, Any, dict[Any, Any]]
X, ROW = draw(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
PAIRS = {"c": draw(4, 7, high=V, seed=1), "r": draw(4, 7, high=V, seed=2)}
MASKED = {
    "x": draw(4, 5, 3),
    "t": draw(4, 5, seed=5),
    "m": (torch.arange(5) < torch.tensor([[5], [3], [4], [2]])) * 1.0,
}
ROLLOUT = {"obs": draw(6, 4, 4), "act": draw(6, 4, high=3) - 1, "ret": draw(6, 4, seed=9)}
SPEECH = {
    "x": draw(4, 12, 5),
    "n": torch.tensor([12, 10, 11, 9]),
    "y": draw(4, 4, high=9),
    "k": torch.tensor([4, 3, 2, 4]),
}
RIGHT: dict[str, Callable[[], Case]] = {
    "classes": lambda: (net(3, 4), ce, {"x": X, "y": torch.tensor([0, 3, 1, 2, 0, 1])}),
    "two classes": lambda: (net(3, 2), ce, {"x": X, "y": ROW}),
    "two classes, bool": lambda: (net(3, 2), ce, {"x": X, "y": ROW.bool()}),
    "two classes, int32": lambda: (net(3, 2), ce, {"x": X, "y": ROW.int()}),
    "a column of two classes": lambda: (net(3, 1), bce, {"x": X, "y": ROW[:, None].float()}),
    "several labels": lambda: (net(3, 4), bce, {"x": X, "y": draw(6, 4, high=3) - 1}),
    "regression": lambda: (net(3, 8, 1), lambda m, b: F.mse_loss(m(b["x"])[:, 0], b["y"]), {"x": X, "y": draw(6)}),
    "autoencoder": lambda: (net(3, 2, 3), lambda m, b: F.mse_loss(m(b["x"]), b["x"]), {"x": X}),
    "a masked series": lambda: (net(3, 1), masked, MASKED),
    "CTC": lambda: (net(5, 9), ctc, SPEECH),
    "CTC, -100 after the target": lambda: (
        net(5, 9),
        lambda m, b: ctc(m, {**b, "y": b["y"].clamp(min=0), "k": (b["y"] >= 0).sum(-1)}),
        {**SPEECH, "y": torch.where(torch.arange(4) < SPEECH["k"][:, None], SPEECH["y"], -100)},
    ),
    "SFT": lambda: (Causal(), sft, answers()),
    "SFT, labels as a mask": lambda: (Causal(), marked, answers()),
    "pre-training": lambda: (Causal(), lambda m, b: nll(m(b["x"]), b["y"]), xy()),
    "pre-training, padded": lambda: (
        Causal(), sft, answers() | {"labels": answers()["ids"].masked_fill(answers()["attention"] == 0, -100)}
    ),
    "A2C, time first": lambda: (nn.ModuleDict({"p": net(4, 3), "v": net(4, 1)}), actor_critic, ROLLOUT),
    "ORPO": lambda: (Causal(), orpo, PAIRS),
    "SimPO": lambda: (Causal(), lambda m, b: pair_loss(m, b)[0], PAIRS),
    "in-batch negatives": lambda: (net(3, 4), contrast, {"a": X, "b": draw(6, 3, seed=8)}),
    "time first": lambda: (Causal(), time_first, {k: v.T for k, v in xy().items()}),
    "a weight for each class": lambda: (
        net(3, 4), weighed, {"x": X[:4], "y": torch.tensor([0, 3, 1, 2]), "w": torch.tensor([1.0, 2, 0.5, 1])}
    ),
    "uint16 ids": lambda: (
        Causal(), lambda m, b: m(b["x"].long()).square().mean(), {"x": draw(4, 5, high=9).to(torch.uint16)}
    ),
    "complex": lambda: (net(3, 2), lambda m, b: m(b["x"].abs()).square().mean(), {"x": torch.complex(X, X)}),
    "whole numbers as keys": lambda: (net(3, 2), lambda m, b: F.cross_entropy(m(b[0]), b[1]), {0: X, 1: ROW}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_without_declarations_do_not_fail(name: str) -> None:
    verdict = audit(*RIGHT[name]())
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize(
    ("name", "law", "declared", "text"),
    [
        ("in-batch negatives", "SE", {"rows_interact": False}, "rows_interact="),
        ("ORPO", "PAIR", {"pairwise": True}, "pairwise=True"),
        ("pre-training", "CV", {"all_supervised": False}, "all_supervised=True"),
        ("pre-training, padded", "CV", {"all_supervised": False}, "all_supervised=True"),
    ],
)
def test_what_only_a_declaration_decides_is_not_declared_and_fails_with_it(
    name: str, law: str, declared: dict[str, Any], text: str
) -> None:
    rows = [f for f in audit(*RIGHT[name]()).findings if f.law == law and f.outcome == "not declared"]
    assert any(text in f.meaning for f in rows), rows
    assert law in {f.law for f in audit(*RIGHT[name](), **declared).failures}


BROKEN: dict[str, tuple[Callable[[], Case], str]] = {
    "a term that ignores the mask": (
        lambda: (net(3, 1), lambda m, b: masked(m, b) + 0.1 * m(b["x"]).square().mean(), MASKED), "MI"
    ),
    "labels as a mask, one place off": (lambda: (Causal(), lambda m, b: marked(m, b, 0), answers()), "MI"),
    "labels that are not shifted": (
        lambda: (Causal(), lambda m, b: nll(m(b["ids"], b["attention"]), b["labels"]), answers()), "CV-SHIFT"
    ),
    "a flipped sign": (lambda: (Causal(), lambda m, b: -sft(m, b), answers()), "NLL"),
    "a term without a gradient": (
        lambda: (Causal(), lambda m, b: sft(m, b) - 0.9 * sft(m, b).detach(), answers()), "FD"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_steps_without_declarations_fail(name: str) -> None:
    make, law = BROKEN[name]
    assert law in {f.law for f in audit(*make()).failures}


def test_a_guess_writes_no_ignored_label_that_is_neither_declared_nor_present() -> None:
    model, loss, batch = RIGHT["pre-training"]()
    seen: list[bool] = []

    def heard(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        seen.append(bool((batch["y"] < 0).any()))
        return loss(model, batch)

    verdict = audit(model, heard, batch)
    assert verdict.holds and not any(seen), str(verdict)
    assert any("ignore_index" in f.meaning for f in verdict.findings if f.outcome == "not declared")
    assert audit(model, heard, batch, ignore_index=-100).holds and any(seen)


def test_targets_and_class_numbers_have_no_role() -> None:
    for name in ("a column of two classes", "several labels", "classes", "two classes", "CTC, -100 after the target"):
        model, loss, batch = RIGHT[name]()
        assert "y" not in infer(model, loss, batch).roles.values(), name
    model, loss, batch = RIGHT["a masked series"]()
    assert infer(model, loss, batch).roles["mask"] == "m"
    model, loss, batch = RIGHT["A2C, time first"]()
    assert "labels" not in infer(model, loss, batch).roles


def test_rows_that_are_not_first_are_not_declared_without_roles() -> None:
    """Time first, and a weight for each of as many classes as rows; beside them an order that matters by mistake."""
    for name in ("time first", "a weight for each class"):
        model, loss, batch = RIGHT[name]()
        verdict = audit(Step(model=model, loss=loss, batch=batch))
        rows = [f for f in verdict.findings if f.law == "SE" and f.outcome == "not declared"]
        assert not verdict.failures and rows and all("rows_interact=" in f.meaning for f in rows), str(verdict)
    model, loss, batch = RIGHT["time first"]()
    assert any("the rows are not in the first dimension" in note for note in audit(model, loss, batch).notes)
    other = torch.arange(12.0)

    def paired(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * other[: len(batch["y"])]).mean()

    broken = audit(Step(model=net(3, 4), loss=paired, batch={"x": X, "y": torch.tensor([0, 3, 1, 2, 0, 1])}))
    assert "SE" in {f.law for f in broken.failures}, str(broken)


def test_a_declared_step_whose_rows_interact_fails() -> None:
    model, loss, batch = RIGHT["in-batch negatives"]()
    assert "SE" in {f.law for f in audit(Step(model=model, loss=loss, batch=batch)).failures}


def test_labels_that_nothing_reads_are_named() -> None:
    def unread(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return nll(model(batch["ids"], batch["attention"])[:, :-1], batch["ids"][:, 1:])

    notes = audit(Causal(), unread, answers(), quick=True).notes
    assert "labels has entries of -100: roles={'labels': 'labels'} declares it" in notes


def test_entries_that_cannot_be_read_again_or_edited() -> None:
    loss = lambda model, batch: model(X).square().mean()  # noqa: E731
    with pytest.raises(StepError, match="'n' is a generator, which can be read only once: give a list"):
        audit(net(3, 2), loss, {"x": X, "n": (i for i in range(3))})
    with pytest.raises(StepError, match="'n' is a nested tensor, whose rows cannot be edited: give a padded one"):
        audit(net(3, 2), loss, {"x": X, "n": torch.nested.nested_tensor([X, X[:2]])})
