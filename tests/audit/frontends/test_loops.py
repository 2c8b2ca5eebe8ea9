"""Loops in the form of accelerate, Lightning, torchtune and nanochat, written here: a planted bug is found, and the
right version is clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from earnest_audit import Verdict, audit, watch
from earnest_audit.frontends import lightning, recipe
from tests.audit.steps import Tiny, sft_step

pytestmark = pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")


def failed(verdict: Verdict) -> set[str]:
    assert verdict.holds or verdict.failures, str(verdict)
    return {f.law for f in verdict.failures}


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "made for a copy", "never cleared"])
def test_a_loop_of_accelerate(fault: str) -> None:
    """The watch looks through the prepared optimizer."""
    step = sft_step()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Tiny()
    owner = Tiny() if fault == "made for a copy" else model
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(owner.parameters(), lr=1e-3))
    with watch(model, optimizer) as w:
        for _ in range(16):
            with accelerator.accumulate(model):
                loss, metrics = step.loss(model, step.batch)
                accelerator.backward(loss)
                w.step(loss, metrics)
                optimizer.step()
                if fault != "never cleared":
                    optimizer.zero_grad()
    assert bool(failed(w.verdict())) == bool(fault), str(w.verdict())


# --- Lightning --------------------------------------------------------------------------------------------------------


class Module(Tiny):
    """A LightningModule, as far as a step needs one; ``log`` is the trainer's."""

    label = "labels"

    def log(self, name: str, value: Any, **options: Any) -> None:
        raise RuntimeError("no trainer is attached")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch["ids"], batch["attention"])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[self.label][:, 1:].flatten(), ignore_index=-100)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss}


class OnEverything(Module):
    """The loss is taken on the prompt and the padding too."""

    label = "ids"


@pytest.mark.parametrize(("kind", "laws"), [(Module, set()), (OnEverything, {"IG"})])
def test_a_module_of_lightning(kind: type[Module], laws: set[str]) -> None:
    step = sft_step()
    module = kind()
    made = lightning(
        module, step.batch, roles=step.roles, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
        metrics={"train_loss": (0.0, None)},
    )  # fmt: skip
    found = failed(audit(made))
    assert laws <= found if laws else not found, found
    with pytest.raises(RuntimeError, match="no trainer"):
        module.training_step(dict(step.batch), 0)  # the module's own log is back


# --- torchtune --------------------------------------------------------------------------------------------------------


class Recipe:
    """A recipe that owns its model and its loss; labels are shifted by one inside."""

    def __init__(self, shift: int) -> None:
        self._model, self._shift = Tiny(), shift
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        logits = self._model(**batch)
        ignored = torch.full_like(labels[:, : self._shift], -100)
        shifted = torch.hstack([labels[:, self._shift :], ignored])
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


@pytest.mark.parametrize(("shift", "laws"), [(1, set()), (2, {"CV-SHIFT"})])
def test_a_recipe_of_torchtune(shift: int, laws: set[str]) -> None:
    step, owner = sft_step(), Recipe(shift)
    model = owner._model
    found = failed(audit(recipe(owner, step.batch, roles=step.roles, optimizer=owner._optimizer)))
    assert laws <= found if laws else not found, found
    assert owner._model is model


# --- nanochat ---------------------------------------------------------------------------------------------------------


class Chat(Tiny):
    """A model that computes its loss: forward(x, y), with targets that are shifted already."""

    def forward(self, x: Tensor, y: Tensor | None = None, *_: Any) -> Tensor:
        logits = super().forward(x)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)


def parameters(model: nn.Module, matrices: bool) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if (p.ndim == 2) == matrices)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(1, 23, (4, 9), generator=rng)
        yield tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("steps_all", [True, False])
def test_a_loop_of_nanochat(steps_all: bool) -> None:
    """Two optimizers and accumulation; the planted bug steps only the first of them."""
    model, data = Chat(), batches()
    optimizers = [
        torch.optim.SGD(parameters(model, True), lr=1e-2),
        torch.optim.AdamW(parameters(model, False), lr=1e-2),
    ]
    with watch(model, optimizers, all_supervised=True) as w:
        for _ in range(24):
            for _ in range(2):
                loss = model(*next(data)) / 2
                loss.backward()
            w.step(loss)
            for optimizer in optimizers[: None if steps_all else 1]:
                optimizer.step()
            model.zero_grad(set_to_none=True)
    assert bool(failed(w.verdict())) != steps_all, str(w.verdict())


def right(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch["x"], batch["y"])
    return found


def sees_its_targets(model: nn.Module, batch: Any) -> Tensor:
    """x is shifted with y: every token is predicted from itself."""
    found: Tensor = model(batch["x"].roll(-1, 1), batch["y"])
    return found


@pytest.mark.parametrize(("loss", "clean"), [(right, True), (sees_its_targets, False)])
def test_a_step_of_nanochat_with_guessed_roles(loss: Callable[..., Tensor], clean: bool) -> None:
    model = Chat()
    x, y = next(batches())
    verdict = audit(model, loss, {"x": x, "y": y}, all_supervised=True, ignore_index=-1)
    assert "guessed: x is ids (sure: whole numbers that the layers read)" in verdict.notes
    assert (not failed(verdict)) == clean, str(verdict)
