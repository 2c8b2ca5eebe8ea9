"""What crosses the wire: hand-worked numbers, laws, sizes, and the error that is fed back."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from earnest.diloco.globals import Globals, OuterSGD
from earnest.diloco.ledger import Ledger
from earnest.diloco.manager import BucketManager
from earnest.diloco.protocol import Rules, average
from earnest.diloco.wire import (
    CHUNK,
    KINDS,
    Wire,
    decode,
    pack_bits,
    pack_gaps,
    quantize,
    unpack_bits,
    unpack_gaps,
    visible,
)
from earnest.errors import ConfigError
from earnest.store import Bucket, Damaged
from tests.diloco.test_store import Memory

numbers = st.floats(-1e3, 1e3, width=32)
vectors = st.lists(numbers, min_size=1, max_size=700).map(lambda x: torch.tensor(x, dtype=torch.float32))


def send(kind: Any, v: torch.Tensor, start: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    start = torch.zeros_like(v) if start is None else start
    return decode(Wire(kind, **more).encode(v, start), v.numel())


def test_int4_by_hand() -> None:
    """Scale 7, so that levels are the values themselves: −7 … 7, and halves go to the even neighbour."""
    v = torch.tensor([7.0, -7.0, 0.0, 3.0, 2.5, -1.5, 1.4])
    assert send("int4", v).tolist() == [7.0, -7.0, 0.0, 3.0, 2.0, -2.0, 1.0]


def test_topk_by_hand() -> None:
    """Of four numbers half: the two largest, whatever their sign; 127 and −64 are levels of the scale 127."""
    v = torch.tensor([1.0, -64.0, 127.0, 3.0])
    assert send("topk", v, density=0.5).tolist() == [0.0, -64.0, 127.0, 0.0]


def test_pulse_by_hand() -> None:
    """Near 1, bf16 has steps of 1/128 above and 1/256 below: a change of 1/1024 is not seen, one of 1/64 is."""
    start = torch.tensor([1.0, 1.0, 0.0])
    v = torch.tensor([1 / 1024, 1 / 64, 1e-20])
    assert visible(start, v).tolist() == [False, True, True]  # from 0 every change is seen
    assert send("pulse", v, start).tolist() == pytest.approx([0.0, 1 / 64, 1e-20])


def test_gaps_by_hand() -> None:
    """0, 3: none skipped, then two. 260 after 3: 256 skipped = 255 and 1 more."""
    packed = pack_gaps(torch.tensor([0, 3, 260]))
    assert packed.tolist() == [0, 2, 255, 1]
    assert unpack_gaps(packed).tolist() == [0, 3, 260]


@given(st.lists(st.integers(0, 5000), unique=True).map(sorted))
def test_gaps_come_back(at: list[int]) -> None:
    assert unpack_gaps(pack_gaps(torch.tensor(at, dtype=torch.int64))).tolist() == at


@given(st.lists(st.integers(0, 15)))
def test_nibbles_come_back(codes: list[int]) -> None:
    packed = pack_bits(torch.tensor(codes, dtype=torch.uint8), 4)
    assert packed.numel() == -(-len(codes) // 2)
    assert unpack_bits(packed, len(codes), 4).tolist() == codes


@given(vectors)
def test_fp32_is_exact(v: torch.Tensor) -> None:
    assert torch.equal(send("fp32", v), v)


@given(vectors)
def test_errors_stay_inside_half_a_level(v: torch.Tensor) -> None:
    for kind, top, block in (("int8", 127, 256), ("int4", 7, 128)):
        error = (send(kind, v) - v).abs()
        for i in range(0, v.numel(), block):
            part = v[i : i + block].abs().max()
            assert float(error[i : i + block].max()) <= float(part) / top / 2 * (1 + 1e-5)
    assert torch.equal(send("bf16", v), v.bfloat16().float())


@given(vectors, st.floats(0.01, 1.0))
def test_topk_keeps_the_largest(v: torch.Tensor, density: float) -> None:
    got = send("topk", v, density=density)
    k = max(1, round(density * v.numel()))
    at = got.nonzero()[:, 0]
    assert len(at) <= k
    rest = torch.ones(v.numel(), dtype=torch.bool)
    rest[at] = False
    if rest.any() and len(at) == k:
        assert float(v[rest].abs().max()) <= float(v[at].abs().min())


@given(vectors, st.integers(0, 2**32 - 1))
def test_pulse_sends_what_bf16_sees_and_nothing_else(v: torch.Tensor, seed: int) -> None:
    start = torch.randn(v.numel(), generator=torch.Generator().manual_seed(seed))
    got = send("pulse", v, start)
    seen = start.bfloat16() != (start - v).bfloat16()
    assert torch.equal(got[seen], v[seen]) and not bool(got[~seen].any())


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "fp32"])
def test_what_is_not_sent_is_sent_later(kind: Any) -> None:
    """Σ sent + residual = Σ differences. A wire that forgot its error would be off by all of it, for ever."""
    chance = torch.Generator().manual_seed(0)
    start, total, arrived = torch.randn(1000, generator=chance), torch.zeros(1000), torch.zeros(1000)
    residual = torch.zeros(1000)
    for _ in range(50):
        v = 1e-3 * torch.randn(1000, generator=chance)
        sent = send(kind, v + residual, start)
        residual = v + residual - sent
        total, arrived = total + v, arrived + sent
    torch.testing.assert_close(arrived + residual, total, rtol=1e-4, atol=1e-6)
    assert float(residual.norm()) < float(total.norm())


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("fp32", 32), ("bf16", 16), ("int8", 8.125), ("int4", 4.25), ("topk", 16 / 64), ("sparseloco", 11 / 64)],
)
def test_the_sizes_are_those_of_the_table(kind: Any, bits: float) -> None:
    n = 256_000
    v = torch.randn(n, generator=torch.Generator().manual_seed(0))
    size = 8 * len(Wire(kind).encode(v, torch.zeros(n)))
    assert size == pytest.approx(bits * n, rel=0.08)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found(kind: Any) -> None:
    v = torch.arange(100, dtype=torch.float32)
    payload = Wire(kind).encode(v, torch.zeros(100))
    for cut in (0, 7, 20, len(payload) // 2, len(payload) - 1):
        with pytest.raises(Damaged):
            decode(payload[:cut], 100)
    with pytest.raises(Damaged, match="100 numbers, 99 are trained"):
        decode(payload, 99)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(Damaged, match="not finite"):
        send("fp32", torch.tensor([1.0, float("nan")]))


def test_zero_blocks_and_tiny_numbers() -> None:
    for kind in ("int8", "int4", "topk", "sparseloco"):
        assert not bool(send(kind, torch.zeros(300)).any())
        tiny = torch.full((300,), 1e-38)
        assert torch.isfinite(send(kind, tiny)).all()


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="only topk and sparseloco have a density"):
        Wire("int8", 0.1)
    with pytest.raises(ConfigError, match="fp32 sends everything"):
        Wire("fp32", feedback=0.5)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Wire("sparseloco", feedback=1.5)
    with pytest.raises(ConfigError, match="unknown"):
        Wire("int3")  # type: ignore[arg-type]


# --- SparseLoCo -------------------------------------------------------------------------------------------------------


def test_sparseloco_by_hand() -> None:
    """Half of eight: 8, −6, 2 and −2. Their mean magnitude is 4.5, so 2 and −2 share one level and 8 and −6 the other,
    the mean 7."""
    v = torch.tensor([1.0, 8.0, 0.5, -6.0, 2.0, 1.5, -2.0, 0.0])
    assert send("sparseloco", v, density=0.5).tolist() == [0.0, 7.0, 0.0, -7.0, 2.0, 0.0, -2.0, 0.0]


@given(st.integers(1, 9000), st.floats(0.001, 0.2), st.integers(0, 2**32 - 1))
def test_sparseloco_sends_a_share_of_every_chunk(n: int, density: float, seed: int) -> None:
    """Also where one chunk is a thousand times larger than the others, which a top-k of the whole would send alone. The
    sent numbers have the right signs, and sending the result again changes nothing."""
    chance = torch.Generator().manual_seed(seed)
    v = torch.randn(n, generator=chance) * torch.where(torch.arange(n) < CHUNK, 1e3, 1.0)
    got = send("sparseloco", v, density=density)
    for begin in range(0, n, CHUNK):
        part, wanted = got[begin : begin + CHUNK], v[begin : begin + CHUNK]
        at = part.nonzero()[:, 0]
        assert len(at) == max(1, round(density * part.numel()))
        assert torch.equal(part[at].sign(), wanted[at].sign()) and len(part[at].abs().unique()) <= 2
        rest = wanted.clone()
        rest[at] = 0
        assert float(rest.abs().max()) <= float(wanted[at].abs().min())
    assert torch.equal(send("sparseloco", got, density=density), got)


@given(st.lists(st.integers(0, 3)))
def test_quarters_come_back(codes: list[int]) -> None:
    packed = pack_bits(torch.tensor(codes, dtype=torch.uint8), 2)
    assert packed.numel() == -(-len(codes) // 4)
    assert unpack_bits(packed, len(codes), 2).tolist() == codes


@pytest.mark.parametrize(
    ("wire", "share"), [(Wire("sparseloco"), 0.95), (Wire("topk", feedback=0.5), 0.5), (Wire("int4"), 1.0)]
)
def test_the_feedback_conserves_the_difference(wire: Wire, share: float) -> None:
    """In every round sent + residual = difference + share · last residual: bit for bit in fp32."""
    agreed = Globals([[torch.zeros(300)]], OuterSGD())
    ledger = Ledger(Bucket(Memory()))
    ledger.put_state(0, b"", agreed.fingerprint())
    manager = BucketManager(ledger, Rules(1, 1), 0, agreed, wire, tokens=1)
    chance, residual = torch.Generator().manual_seed(0), torch.zeros(300)
    for _ in range(3):
        delta = torch.randn(300, generator=chance)
        vector, average_ = delta + share * residual, delta.clone()
        manager.start_quorum()
        manager.allreduce(average_).wait()  # of one replica: what it sent
        manager.should_commit()
        residual = manager.residual[0]
        assert torch.equal(residual, vector - average_) and float(residual.norm()) > 0


# --- the average ------------------------------------------------------------------------------------------------------


def test_the_average_by_hand() -> None:
    """(1·4 + 3·8) / 4 = 7."""
    assert average([torch.tensor([4.0]), torch.tensor([8.0])], [10, 30]).tolist() == [7.0]
    assert average([torch.tensor([4.0]), torch.tensor([8.0])], [0, 5]).tolist() == [8.0]
    assert average([torch.tensor([4.0]), torch.tensor([8.0])], [0, 0]).tolist() == [6.0]


@given(st.lists(vectors.filter(lambda v: v.numel() >= 3).map(lambda v: v[:3]), min_size=1, max_size=5), st.data())
def test_the_average_against_float64(parts: list[torch.Tensor], data: Any) -> None:
    tokens = data.draw(st.lists(st.integers(1, 5000), min_size=len(parts), max_size=len(parts)))
    got = average(parts, tokens)
    want = np.average(np.stack([p.double().numpy() for p in parts]), axis=0, weights=tokens)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-3)


@given(vectors, vectors, st.integers(1, 10**6))
def test_equal_tokens_are_a_plain_mean(a: torch.Tensor, b: torch.Tensor, tokens: int) -> None:
    """Bit for bit gloo's sum and one division, whatever the number of tokens."""
    n = min(a.numel(), b.numel())
    assert torch.equal(average([a[:n], b[:n]], [tokens, tokens]), (a[:n] + b[:n]) / 2)


def test_quantize_gives_a_scale_a_block() -> None:
    levels, scale = quantize(torch.tensor([1.0] * 256 + [4.0]), 127, 256)
    assert scale.tolist() == [1.0, 4.0] and levels.tolist() == [127] * 257
