"""nano, loaded once per session; every test restores it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import earnest as en
from earnest.steering import Contrast
from earnest.tasks.base import Task
from earnest.tasks.style import AXES


@pytest.fixture(scope="session")
def loaded() -> en.Policy:
    return en.load("nano")


@pytest.fixture
def nano(loaded: en.Policy) -> Iterator[en.Policy]:
    before = loaded.fingerprint()
    yield loaded
    assert loaded.fingerprint(fresh=True) == before, "the base's weights were changed"
    left = [n for n, m in loaded.model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not left, f"hooks were left on {left}"


@pytest.fixture
def warmth() -> Task:
    return en.get_task("style/warmth")


@pytest.fixture
def contrast() -> Contrast:
    return Contrast(tuple(AXES["warmth"]["high"]["system"]), tuple(AXES["warmth"]["low"]["system"]))


@pytest.fixture
def contexts(nano: en.Policy, warmth: Task, contrast: Contrast) -> tuple[list[list[int]], list[list[int]]]:
    return contrast.contexts(nano, warmth.prompts("train", 8, 0))


def logits(policy: en.Policy, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(torch.tensor([ids])).logits[0]
