"""Weights as versions: what a sampler has is what the trainer published, and a probe proves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.adapters import LoRA, attach
from earnest.diloco import versions
from earnest.diloco.store import Bucket
from earnest.diloco.versions import Follower, ProbeFailed, Publisher
from earnest.errors import EarnestError
from earnest.models import load
from tests.diloco.test_store import Memory

PROBE = (5, 9, 20, 33, 41, 12, 7)


def pair(tiny: Path) -> tuple[Any, Any]:
    policy = load(str(tiny))
    adapter = attach(policy, LoRA(rank=2), targets=["q_proj", "v_proj"], seed=3)
    return policy, adapter


def move(adapter: Any, size: float, share: float = 1.0, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(size * torch.randn(p.shape, generator=chance) * (torch.rand(p.shape, generator=chance) < share))


@pytest.fixture
def sides(tiny: Path) -> tuple[Publisher, Follower]:
    store = Memory()
    trainer, sampler = pair(tiny), pair(tiny)
    return (
        Publisher(Bucket(store), *trainer, PROBE, full_every=5),
        Follower(Bucket(store), *sampler),
    )


def test_a_sampler_follows_by_patches(sides: tuple[Publisher, Follower]) -> None:
    publisher, follower = sides
    with pytest.raises(EarnestError, match="nothing is published"):
        follower.follow()
    move(publisher.adapter, 0.3)
    full = publisher.publish(0)
    assert follower.follow() < 1e-5 and follower.number == 0
    sizes = []
    for number in range(1, 5):
        move(publisher.adapter, 0.05, share=0.05, seed=number)
        sizes.append(publisher.publish(number))
        if number != 2:  # a sampler that slept through a version takes both patches
            assert follower.follow() < follower.tolerance
    assert max(sizes) < full  # a patch of a twentieth of the weights; headers are most of it at this size
    theirs, mine = publisher.adapter.state_dict(), follower.adapter.state_dict()
    assert all(torch.equal(mine[k].bfloat16(), v.bfloat16()) for k, v in theirs.items())
    assert follower.follow() == 0.0  # nothing new
    move(publisher.adapter, 0.3)
    publisher.publish(5)
    assert follower.follow() < 1e-5  # a whole one
    assert all(torch.equal(follower.adapter.state_dict()[k], v) for k, v in publisher.adapter.state_dict().items())


def test_a_late_sampler_starts_at_the_last_whole_version(sides: tuple[Publisher, Follower]) -> None:
    publisher, follower = sides
    for number in range(8):
        move(publisher.adapter, 0.1, seed=number)
        publisher.publish(number)
    assert follower.follow() < follower.tolerance and follower.number == 7


def test_the_probe_sees_weights_that_are_not_the_trainers(sides: tuple[Publisher, Follower]) -> None:
    """The classic silent one: the adapter is loaded, but not used."""
    publisher, follower = sides
    move(publisher.adapter, 0.5)
    publisher.publish(0)
    for _ in range(2):  # asking again does not make it right
        with follower.adapter.off(), pytest.raises(ProbeFailed, match="does not have the trainer's weights"):
            follower.follow()
    assert follower.number is None and follower.follow() < 1e-5 and follower.number == 0
    move(publisher.adapter, 0.5, seed=1)
    publisher.publish(1)
    with follower.adapter.off(), pytest.raises(ProbeFailed):
        follower.follow()
    assert follower.number == 0 and follower.follow() < follower.tolerance  # the patch is applied once, to version 0


@pytest.mark.parametrize("place", [0, -1])
def test_a_probe_that_is_not_a_number_fails(
    place: int, sides: tuple[Publisher, Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """max() would pass over a NaN that is not the first."""
    publisher, follower = sides
    publisher.publish(0)
    score = versions.probe

    def broken(*args: Any) -> tuple[float, ...]:
        found = list(score(*args))
        found[place] = float("nan")
        return tuple(found)

    monkeypatch.setattr(versions, "probe", broken)
    with pytest.raises(ProbeFailed, match="differ by nan"):
        follower.follow()


def test_a_number_is_published_once(sides: tuple[Publisher, Follower]) -> None:
    publisher, _ = sides
    publisher.publish(0)
    move(publisher.adapter, 0.1)
    with pytest.raises(EarnestError, match="published already"):
        publisher.publish(0)
