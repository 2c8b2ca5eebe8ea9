"""Signed deltas: only what is signed with the key of its own number is averaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from earnest.diloco.ledger import Ledger
from earnest.diloco.signing import VARIABLE, Signatures, make_key, signatures
from earnest.diloco.wire import Wire
from earnest.errors import ConfigError
from earnest.store import Bucket, Damaged
from tests.diloco.test_outer import outer_of, together
from tests.diloco.test_store import Memory
from tests.diloco.toy import ToyEngine


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The public keys of replicas 0 and 1; their files are named by $EARNEST_SIGNING_KEY."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key-{replica}"))
    return tuple(make_key(tmp_path / f"key-{i}") for i in range(2))


def ledger(store: Memory, keys: tuple[str, ...], replica: int) -> Ledger:
    return Ledger(Bucket(store, writer="x", sleep=lambda s: None), signatures=signatures(keys, replica))


def test_a_signature_belongs_to_its_number_payload_round_and_state(keys: tuple[str, ...]) -> None:
    store = Memory()
    mine = ledger(store, keys, 0)
    meta = {"round": 3, "replica": 0, "start": "abc", "tokens": 7}
    assert mine.put_delta(3, 0, 0, b"numbers", meta)
    found = mine.delta(3, 0)
    assert found is not None and found.payload == b"numbers"
    assert mine.signatures is not None
    for forged in (
        replace(found, payload=b"Numbers"),
        replace(found, meta={**found.meta, "tokens": 8}),
        replace(found, meta={**found.meta, "round": 4}),
        replace(found, meta={**found.meta, "signature": ""}),
        replace(found, meta={k: v for k, v in found.meta.items() if k != "signature"}),
    ):
        with pytest.raises(Damaged, match="not signed"):
            mine.signatures.check(forged, 0)
    with pytest.raises(Damaged, match="not signed"):
        mine.signatures.check(found, 1)
    with pytest.raises(Damaged, match="no key of replica 2"):
        mine.signatures.check(found, 2)


def test_a_delta_in_another_replicas_name_is_left_out(keys: tuple[str, ...]) -> None:
    """A stranger writes a huge delta under replica 1's name before replica 1 does: the round averages the real ones."""

    def train(forge: bool) -> list[ToyEngine]:
        store, engines = Memory(), [ToyEngine(0), ToyEngine(1)]
        if forge:
            plain = Ledger(Bucket(store, writer="stranger", sleep=lambda s: None))
            start = outer_of(ToyEngine(0), Memory(), rounds=1).manager.held()
            huge = Wire("fp32").encode(torch.full((12,), 1e6), torch.zeros(12))
            plain.put_delta(0, 1, 0, huge, {"round": 0, "replica": 1, "start": start, "tokens": 10**9})

        def life(i: int) -> None:
            outer = outer_of(engines[i], store, i, replicas=2, quorum=2, rounds=1)
            outer.manager.ledger = replace(outer.manager.ledger, signatures=signatures(keys, i))
            while not outer.over:
                engines[i].step()

        together({i: (lambda i=i: life(i)) for i in range(2)})
        return engines

    real, attacked = train(False), train(True)
    for a, b in zip(real, attacked, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.parameters, b.parameters, strict=True))


def test_a_key_that_is_missing_or_another_is_a_sentence(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signatures(None, 0) is None
    assert isinstance(signatures(keys, 1), Signatures)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key-0"))
    with pytest.raises(ConfigError, match="not that of replica 1"):
        signatures(keys, 1)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is not a key"):
        signatures(keys, 1)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=f"set .{VARIABLE}"):
        signatures(keys, 1)
    assert (tmp_path / "key-0").stat().st_mode & 0o777 == 0o600
