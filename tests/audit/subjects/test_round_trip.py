"""RoundTrip: what is saved is what is loaded; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from earnest_audit import (
    RoundTrip,
    audit,
)
from tests.audit.steps import Tiny
from tests.audit.subjects.test_accumulation import held

IDS = torch.arange(1, 11)[None]


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def kick(model: nn.Module, size: float = 0.1) -> None:
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((size * torch.randn(p.shape, generator=rng)).to(p.dtype))


class Tied(Tiny):
    def __init__(self) -> None:
        super().__init__(0)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight


def trip(load: Callable[[Any, Any], Any], make: Callable[[], nn.Module] = Tied, **more: Any) -> RoundTrip:
    def loaded(model: nn.Module, folder: Path) -> Any:
        return load(model, {k: v.clone() for k, v in torch.load(folder / "m").items()})

    return RoundTrip(
        make, kick, lambda m, f: torch.save(m.state_dict(), f / "m"), loaded, more.pop("says", lambda m: m(IDS)), **more
    )


def frozen(model: nn.Module, state: Any) -> None:
    """PEFT #282, TRL #6700: an adapter comes back frozen."""
    model.load_state_dict(state)
    model.requires_grad_(False)


def untied(model: nn.Module, state: Any) -> None:
    """pytorch #188346: assign=True makes two tensors of one."""
    model.load_state_dict(state, assign=True)
    model.requires_grad_(True)


def test_what_outputs_do_not_show_must_survive_too() -> None:
    right = trip(lambda m, s: m.load_state_dict(s))  # whose return value, a report, is no model
    assert audit(right).holds
    assert failed(trip(frozen)) == {"what is trainable"}
    assert audit(trip(frozen, for_training=False)).holds
    assert failed(trip(untied)) == {"tied parameters"}
    assert failed(trip(lambda m, s: m.bfloat16().load_state_dict(s), tolerance=1.0)) == {"dtypes"}


def test_a_save_that_loses_everything_is_seen() -> None:
    def trip(keep: bool) -> RoundTrip:
        return RoundTrip(
            make=lambda: torch.zeros(3), perturb=lambda x: x.add_(1.0),
            save=lambda x, f: torch.save(x if keep else torch.zeros(3), f / "x"),
            load=lambda x, f: x.copy_(torch.load(Path(f) / "x")), outputs=lambda x: x,
        )  # fmt: skip

    assert audit(trip(True)).holds
    assert {f.law for f in audit(trip(False)).failures} == {"RT"}


def shaken(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


GOES_ON = "load, after the saved one went on"


def test_a_checkpoint_does_not_follow_the_live_model() -> None:
    assert audit(held(True)).holds
    assert failed(held(False)) == {GOES_ON}


def test_a_perturbation_that_is_always_the_same_asks_nothing() -> None:
    def always(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)

    verdict = audit(held(False, always))
    assert verdict.holds and GOES_ON not in {f.subject for f in verdict.findings}
