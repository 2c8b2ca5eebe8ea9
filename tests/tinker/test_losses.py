"""Every loss through the SDK: its value, its log-probs and its gradient, against float64 written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import RequestFailedError, types
from torch import Tensor

from earnest.serve.tinker import losses, passes
from earnest.serve.tinker.data import Datum
from tests.tinker.conftest import Served, datum
from tests.tinker.reference import close


def _published(name: str, lp: Tensor, i: dict[str, Tensor], c: dict[str, Any]) -> Tensor:
    """The formulas of the Tinker documentation, in float64."""
    i = {k: v.double() for k, v in i.items()}
    if name == "cross_entropy":
        return -(lp * i["weights"]).sum()
    ratio, A = torch.exp(lp - i["logprobs"]), i["advantages"]
    low, high = (torch.as_tensor(c.get(f"clip_{k}_threshold", 1.0), dtype=torch.float64) for k in ("low", "high"))
    if name == "importance_sampling":
        return -(ratio * A).sum()
    if name == "ppo":
        return -torch.min(ratio * A, ratio.clip(low, high) * A).sum()
    if name == "cispo":
        return -(ratio.clip(low, high).detach() * lp * A).sum()
    if name == "dro":
        return -(lp * A - 0.5 * c["beta"] * (lp - i["logprobs"]) ** 2).sum()
    assert name == "gspo"
    inside = i["sequence_ratio_mask"] > 0 if "sequence_ratio_mask" in i else torch.ones_like(lp) > 0
    sequence = torch.exp((lp - i["logprobs"])[inside].mean())
    token = sequence.detach() * torch.exp(lp - lp.detach())
    return -torch.min(token * A, token.clip(low, high) * A).sum()


CASES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}


def _inputs(name: str, lp: Tensor, g: torch.Generator) -> dict[str, Tensor]:
    n = lp.shape[0]
    if name == "cross_entropy":
        return {"weights": torch.rand(n, generator=g) - 0.3}
    behaviour = (lp.detach().float() + 0.4 * torch.randn(n, generator=g)).clamp(max=0)
    return {"logprobs": behaviour, "advantages": torch.randn(n, generator=g)}


@pytest.mark.parametrize("given", ["defaults", "config"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_published_ones(
    served: Served, rows: list[list[int]], name: str, given: str
) -> None:
    if given == "config" and not CASES[name]:
        config: dict[str, float] = {}
    elif given == "config":
        config = {"beta": 0.7} if name == "dro" else {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}
    else:
        config = {}
    client = served.training(seed=11)
    with torch.no_grad():  # a LoRA at initialization has B = 0, and no gradient by A
        for n, p in served.adapter(client).named_parameters().items():
            if n.endswith("B"):
                p.copy_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))
    reference = served.reference(client)
    g = torch.Generator().manual_seed(1)
    data, total = [], torch.zeros((), dtype=torch.float64)
    expected = []
    for ids in rows:
        lp = reference.target_logp(ids)
        inputs = _inputs(name, lp, g)
        data.append(datum(ids, **inputs))
        total = total + _published(name, lp, inputs, {**CASES[name], **config})
        expected.append(lp.detach())
    out = client.forward_backward(data, name, config or None).result()  # type: ignore[arg-type]
    assert out.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-4)
    for found, lp in zip(out.loss_fn_outputs, expected, strict=True):
        torch.testing.assert_close(found["logprobs"].to_torch().double(), lp, atol=2e-5, rtol=1e-5)
    ours = {n: p.grad for n, p in served.adapter(client).named_parameters().items()}
    close(ours, reference.gradients(total), 1e-4)


def test_k_targets_per_position(served: Served, rows: list[list[int]]) -> None:
    """(N, K) targets and weights, dense and sparse, and another K in the next datum."""
    client = served.training(seed=12)
    reference = served.reference(client)
    g = torch.Generator().manual_seed(2)
    data, total, expected = [], torch.zeros((), dtype=torch.float64), []
    for ids, K in zip(rows, (3, 3, 8, 2), strict=True):
        targets = torch.randint(0, 1024, (len(ids) - 1, K), generator=g)
        weights = torch.rand(len(ids) - 1, K, generator=g)
        if K == 8:  # nearly empty rows: the SDK sends them as compressed rows
            keep = torch.rand(weights.shape, generator=g) < 0.2
            targets, weights = targets * keep, weights * keep
        logp = reference.logp(ids[:-1]).gather(-1, targets)
        total = total - (weights.double() * logp).sum()
        expected.append(logp.detach())
        data.append(datum(ids, target_tokens=targets, weights=weights))
    assert data[2].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    out = client.forward_backward(data, "cross_entropy").result()
    assert out.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    for found, logp in zip(out.loss_fn_outputs, expected, strict=True):
        torch.testing.assert_close(found["logprobs"].to_torch().double(), logp, atol=3e-5, rtol=1e-5)
    close({n: p.grad for n, p in served.adapter(client).named_parameters().items()}, reference.gradients(total), 1e-4)


def test_gspo_reads_its_mask_and_bounds_that_come_as_inputs(served: Served, rows: list[list[int]]) -> None:
    client = served.training(seed=13)
    ids = rows[2]
    n = len(ids) - 1
    lp = served.reference(client).target_logp(ids).detach()
    behaviour = (lp.float() - 0.2).clamp(max=0)
    behaviour[0] = -9.0  # an outlier that the mask leaves out
    mask = torch.ones(n)
    mask[0] = 0
    base = {"logprobs": behaviour, "advantages": torch.ones(n)}
    wide = {"clip_high_threshold": 100.0}
    masked = client.forward([datum(ids, **base, sequence_ratio_mask=mask)], "gspo", wide).result().metrics["loss:sum"]
    assert masked == pytest.approx(-n * float(torch.tensor(0.2).exp()), rel=1e-4)
    plain = client.forward([datum(ids, **base)], "gspo", wide).result().metrics["loss:sum"]
    assert abs(plain - masked) > 1e-3 * n
    low = {"clip_low_threshold": torch.zeros(n), "clip_high_threshold": torch.full((n,), 1.1)}
    bounded = client.forward([datum(ids, **base, sequence_ratio_mask=mask, **low)], "gspo").result()
    assert bounded.metrics["loss:sum"] == pytest.approx(-n * 1.1, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_the_published_formulas_on_random_data(name: str, seed: int) -> None:
    """Datums of different lengths in one batch, some with the optional inputs of the loss and some without."""
    g = torch.Generator().manual_seed(seed)
    loss = losses.configured(losses.find(name), {"beta": 0.3} if name == "dro" else {})
    data, parts = [], []
    total = torch.zeros((), dtype=torch.float64)
    for n in (1, 7, 4, 12):
        lp = (-3 * torch.rand(n, generator=g, dtype=torch.float64)).requires_grad_()
        inputs = _inputs(name, lp, g)
        if name == "cross_entropy" and n == 4:
            inputs["weights"] = torch.zeros(n)
        config: dict[str, Any] = {**CASES[name], **({"beta": 0.3} if name == "dro" else {})}
        published = dict(inputs)
        if "clip_low_threshold" in config and n % 2:  # bounds as inputs, one per token
            inputs["clip_high_threshold"] = 1 + torch.rand(n, generator=g)
            config["clip_high_threshold"] = inputs["clip_high_threshold"].double()
        if name == "gspo" and n > 4:
            inputs["sequence_ratio_mask"] = published["sequence_ratio_mask"] = (torch.arange(n) % 3 != 0).float()
        if name == "cross_entropy" and n == 7:
            del inputs["weights"]
            published["weights"] = torch.ones(n)
        total = total + _published(name, lp, published, config)
        data.append(Datum((1,) * n, {"target_tokens": torch.ones(n, dtype=torch.long), **inputs}))
        losses.check(loss, data[-1].inputs, {}, "datum")
        parts.append(lp)
    flat = torch.cat(parts).detach().requires_grad_()
    (batch,) = passes.batches(data)
    ours = losses.evaluate(loss, batch, flat, losses.flat_inputs(loss, data))
    assert float(ours.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    (slope,) = torch.autograd.grad(ours, flat)
    expected = torch.cat(torch.autograd.grad(total, parts))
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-12)


def test_weights_that_are_all_0_give_no_loss_and_no_gradient() -> None:
    loss, data = (
        losses.find("cross_entropy"),
        [Datum((1,), {"target_tokens": torch.ones(1).long(), "weights": torch.zeros(1)})],
    )
    lp = torch.tensor([-1.0], requires_grad=True)
    found = losses.evaluate(loss, passes.batches(data)[0], lp, losses.flat_inputs(loss, data))
    assert float(found.detach()) == 0 and torch.autograd.grad(found, lp)[0].tolist() == [0]


def test_forward_leaves_no_gradient_and_a_failed_pass_leaves_it_as_it_was(
    served: Served, rows: list[list[int]]
) -> None:
    client = served.training(seed=14)
    parameters = served.adapter(client).named_parameters()
    good = [datum(ids, weights=torch.ones(len(ids) - 1)) for ids in rows]
    client.forward(good, "cross_entropy").result()
    assert all(p.grad is None for p in parameters.values())
    client.forward_backward(good, "cross_entropy").result()
    before = {n: p.grad.clone() for n, p in parameters.items()}
    n = len(rows[0]) - 1
    wild = datum(rows[0], logprobs=torch.full((n,), -200.0), advantages=torch.ones(n))
    fine = datum(rows[1], logprobs=torch.full((len(rows[1]) - 1,), -1.0), advantages=torch.ones(len(rows[1]) - 1))
    with pytest.raises(RequestFailedError, match="the loss is -inf"):
        client.forward_backward([fine, wild], "importance_sampling").result()
    for name, p in parameters.items():
        assert torch.equal(p.grad, before[name]), name


REFUSED = {
    "unknown loss": ("grpo", {}, {}, "cross_entropy, dro, gspo"),
    "missing input": ("ppo", {"advantages": 1.0}, {}, "ppo needs loss_fn_inputs\\['logprobs'\\]"),
    "input nobody reads": (
        "importance_sampling",
        {"logprobs": -1.0, "advantages": 1.0, "weights": 1.0},
        {},
        "does not read",
    ),
    "setting nobody reads": ("cross_entropy", {"weights": 1.0}, {"beta": 1.0}, "has no settings"),
    "epsilon for a bound": ("ppo", {"logprobs": -1.0, "advantages": 1.0}, {"clip_high_threshold": 0.2}, "ratio itself"),
    "probabilities": ("dro", {"logprobs": 0.5, "advantages": 1.0}, {}, "at most 0"),
    "not finite": ("cross_entropy", {"weights": float("nan")}, {}, "not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_ignored_is_refused(served: Served, rows: list[list[int]], case: str) -> None:
    name, fields, config, said = REFUSED[case]
    ids = rows[1]
    inputs = {k: torch.full((len(ids) - 1,), v) for k, v in fields.items()}
    with pytest.raises(RequestFailedError, match=said) as raised:
        served.training().forward([datum(ids, **inputs)], name, config or None).result()  # type: ignore[arg-type]
    assert raised.value.category == types.RequestErrorCategory.User


def test_tokens_that_do_not_fit_are_refused(served: Served, rows: list[list[int]]) -> None:
    client = served.training()
    ids = rows[1]
    for bad, said in (
        (datum([*ids[:-1], 5000]), "outside 0…1023"),
        (
            types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs={"target_tokens": ids[1:]}),
            "one integer",
        ),
        (datum([1] * 600), "512 positions"),
    ):
        with pytest.raises(RequestFailedError, match=said):
            client.forward([bad], "cross_entropy").result()
