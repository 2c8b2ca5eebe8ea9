"""Make a ``Step`` from a loss in the form of another library: a loss of log-probs (verl, prime-rl), a module with a
``training_step`` (Lightning), a recipe that owns its model (torchtune).

    audit(verl(my_policy_loss, settings={"clip_ratio": Setting(0.2, "clip")}, config=actor_config))
    audit(prime_rl(my_loss, settings={"clip_eps": Setting(0.2, "clip")}))
    audit(lightning(module, batch, roles={"ids": "input_ids", "labels": "labels"}))
    audit(recipe(torchtune_recipe, batch, roles={"ids": "tokens", "labels": "labels"}))

None of these libraries is imported. A loss of log-probs is audited on a small policy and a batch that are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.measure import number, result_of
from earnest_audit.restore import replaced
from earnest_audit.step import Step

VOCABULARY, WIDTH, ROWS, LENGTH = 29, 16, 5, 10
ROLES = {"ids": "ids", "mask": "mask", "behaviour": "old", "advantages": "advantages"}
REFERENCE = {"reference": "ref"}


def verl(
    loss_fn: Callable[..., Any], *, config: Any = None, loss_agg_mode: str = "token-mean", **declared: Any
) -> Step:
    """The step of a policy loss with verl's signature: ``loss_fn(old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config)`` -> loss, or (loss, metrics). Declared ``settings`` replace fields of ``config``."""

    def loss(model: nn.Module, batch: Mapping[str, Any], **changed: Any) -> Any:
        mask, lp = batch["mask"], _logprobs(model, batch)
        advantages = batch["advantages"][:, None] * mask
        return loss_fn(batch["old"], lp, advantages, mask, loss_agg_mode, _Changed(config, changed))

    return _of_logprobs(loss, ROLES, **declared)


def prime_rl(
    loss_fn: Callable[..., Any], *, inputs: Callable[..., Any] = SimpleNamespace, reference: bool = False,
    **declared: Any,
) -> Step:  # fmt: skip
    """The step of a loss with prime-rl's signature: ``loss_fn(inputs, **settings)`` -> outputs with ``loss`` and
    ``metrics``, for one sequence. The losses of the sequences are summed and divided by the number of trained tokens.
    ``inputs`` makes the argument (prime-rl's ``LossInputs``). Set ``reference=True`` if the loss reads
    ``ref_logprobs``."""

    def loss(model: nn.Module, batch: Mapping[str, Any], **changed: Any) -> Any:
        lp, mask = _logprobs(model, batch), batch["mask"]
        total, logged = lp.new_zeros(()), list[Mapping[str, Any]]()
        for row in range(len(lp)):
            found = loss_fn(
                inputs(
                    trainer_logprobs=lp[row],
                    inference_logprobs=batch["old"][row],
                    ref_logprobs=batch["ref"][row] if reference else None,
                    advantages=batch["advantages"][row].expand_as(lp[row]),
                    loss_mask=mask[row] != 0,
                    loss_weights=None,
                ),
                **changed,
            )
            total = total + found.loss
            logged.append(found.metrics)
        return total / mask.sum(), {name: sum(number(m[name]) for m in logged) / len(logged) for name in logged[0]}

    return _of_logprobs(loss, ROLES | (REFERENCE if reference else {}), **declared)


def lightning(module: nn.Module, batch: Mapping[str, Any], **declared: Any) -> Step:
    """The step of a LightningModule: its ``training_step(batch, 0)``; what it logs are the metrics."""

    def loss(model: Any, changed: Mapping[str, Any], **_: Any) -> Any:
        logged: dict[str, Any] = {}
        collect = {"log": lambda name, value, *_, **__: logged.update({name: value}),
                   "log_dict": lambda values, *_, **__: logged.update(values)}  # fmt: skip
        with replaced(model, collect):
            value, metrics = result_of(model.training_step(dict(changed), 0))
        return value, {**metrics, **logged}

    return Step(model=module, loss=loss, batch=batch, **declared)


def recipe(
    owner: Any, batch: Mapping[str, Any], *, model: str = "_model", call: str = "_loss_step", **declared: Any
) -> Step:
    """The step of an object that owns its model, as torchtune's recipes do: ``owner._loss_step(batch)``."""

    def loss(changed_model: nn.Module, changed: Mapping[str, Any], **_: Any) -> Any:
        with replaced(owner, {model: changed_model}):
            return getattr(owner, call)(dict(changed))

    return Step(model=getattr(owner, model), loss=loss, batch=batch, **declared)


class _Changed:
    """A config with some fields replaced; it has ``get``, too."""

    def __init__(self, config: Any, changed: Mapping[str, Any]) -> None:
        self._config, self._changed = config, changed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy's: it begins without fields
            raise AttributeError(name)
        changed = self.__dict__["_changed"]
        return changed[name] if name in changed else getattr(self.__dict__["_config"], name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def _logprobs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """log π(ids[t]) for t = 1 …, aligned with ids[:, 1:]."""
    ids = batch["ids"]
    found: Tensor = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found


def _of_logprobs(loss: Callable[..., Any], roles: dict[str, str], *, seed: int = 0, **declared: Any) -> Step:
    """The step on a small policy and a slightly off-policy batch of rows of different lengths, with ratios on both
    sides of 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        lengths = torch.randint(LENGTH // 2, LENGTH, (ROWS, 1))
        mask = (torch.arange(LENGTH - 1) < lengths) & (torch.arange(LENGTH - 1) >= 2)
        with torch.no_grad():
            now = _logprobs(model, {"ids": ids})
        batch = {
            "ids": ids,
            "mask": mask.float(),
            "old": (now + 0.05 * torch.randn_like(now)).clamp(max=-1e-3),
            "ref": (now - 0.2 * torch.randn_like(now).abs()).clamp(max=-1e-3),
            "advantages": torch.randn(ROWS),
        }
    return Step(
        model=model,
        loss=loss,
        batch={key: batch[key] for key in roles.values()},
        roles=dict(roles),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        logprobs=_logprobs,
        seed=seed,
        **declared,
    )
