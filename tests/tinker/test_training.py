"""Steps, order, checkpoints and the seam of custom losses, through the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tinker
import torch
from tinker import RequestFailedError, types

from tests.tinker.conftest import Served, datum


def _sft(rows: list[list[int]]) -> list[types.Datum]:
    return [datum(ids, weights=torch.ones(len(ids) - 1) / len(ids)) for ids in rows]


@contextmanager
def _chunks_of(service: tinker.ServiceClient, size: int) -> Iterator[None]:
    """The SDK with smaller parts of a batch."""
    before = service.holder._client_config
    service.holder._client_config = before.model_copy(update={"fwdbwd_max_chunk_len": size})
    try:
        yield
    finally:
        service.holder._client_config = before


def test_optim_step_is_torchs_adamw_with_the_steps_own_settings(served: Served, rows: list[list[int]]) -> None:
    """Three steps whose every setting changes, against torch.optim.AdamW in float64; two passes add up before one."""
    client = served.training(seed=21)
    reference = served.reference(client)
    factors = list(reference.factors.values())
    theirs = torch.optim.AdamW(factors)
    steps = (
        types.AdamParams(learning_rate=3e-3),
        types.AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.05),
        types.AdamParams(learning_rate=2e-3, weight_decay=0.01, grad_clip_norm=1e9),
    )
    for params in steps:
        theirs.zero_grad()
        for half in (rows[:2], rows[2:]):
            loss = sum(-reference.target_logp(ids).sum() / len(ids) for ids in half)
            loss.backward()  # type: ignore[union-attr]
            client.forward_backward(_sft(half), "cross_entropy")
        norm = torch.nn.utils.get_total_norm([p.grad for p in factors if p.grad is not None])
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(factors, params.grad_clip_norm)
        group = theirs.param_groups[0]
        group["lr"], group["betas"], group["eps"] = params.learning_rate, (params.beta1, params.beta2), params.eps
        group["weight_decay"] = params.weight_decay
        theirs.step()
        said = client.optim_step(params).result().metrics
        assert said is not None
        assert said["unclipped_grad_l2:mean"] == pytest.approx(float(norm), rel=1e-4)
        bound = params.grad_clip_norm
        assert said["clip_factor:mean"] == pytest.approx(min(1.0, bound / float(norm)) if bound else 1.0, rel=1e-4)
    # eps is 1e-12, so a gradient of rounding's size still steps by lr: compare what moved by its norm.
    ours = served.adapter(client).named_parameters()
    for name, p in reference.factors.items():
        if float(p.grad.abs().max()) > 1e-6:
            off = (ours[name].double() - p).norm() / p.norm()
            assert float(off.detach()) < 2e-3, f"{name}: {float(off.detach()):.3g}"


def test_a_step_needs_a_gradient_and_leaves_none(served: Served, rows: list[list[int]]) -> None:
    client = served.training(seed=22)
    with pytest.raises(RequestFailedError, match="no gradient"):
        client.optim_step(types.AdamParams()).result()
    client.forward_backward(_sft(rows), "cross_entropy")
    client.optim_step(types.AdamParams()).result()
    with pytest.raises(RequestFailedError, match="no gradient"):
        client.optim_step(types.AdamParams()).result()
    client.forward_backward(_sft(rows), "cross_entropy")
    with pytest.raises(RequestFailedError, match=r"beta2 is 1\.5"):
        client.optim_step(types.AdamParams(beta2=1.5)).result()


def test_parts_of_a_batch_are_added_up_in_order_however_they_arrive(served: Served, rows: list[list[int]]) -> None:
    """The SDK sends the parts of a batch at once, the first last; the step after them must wait for all."""
    whole, cut = served.training(seed=23), served.training(seed=23)
    data = _sft(rows) * 3
    for client, size in ((whole, 1024), (cut, 2)):
        with _chunks_of(served.service, size):
            out = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2))
            after = client.forward(data, "cross_entropy").result()
            assert len(out.result().loss_fn_outputs) == len(data)
            assert after.metrics["loss:sum"] < out.result().metrics["loss:sum"]
    theirs = served.adapter(whole).named_parameters()
    for name, p in served.adapter(cut).named_parameters().items():
        torch.testing.assert_close(p, theirs[name], atol=1e-4, rtol=1e-3)


def test_a_custom_loss_is_the_built_in_one(served: Served, rows: list[list[int]]) -> None:
    """forward_backward_custom with dro written by hand: the same gradient as the built-in dro."""
    ours, theirs = served.training(seed=24), served.training(seed=24)
    data = []
    for ids in rows:
        n = len(ids) - 1
        data.append(datum(ids, logprobs=-torch.arange(1.0, n + 1), advantages=torch.linspace(-1, 1, n)))

    def dro(data: list[types.Datum], lps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for d, lp in zip(data, lps, strict=True):
            q, A = (d.loss_fn_inputs[k].to_torch() for k in ("logprobs", "advantages"))
            total = total - (lp * A - 0.5 * 0.05 * (lp - q) ** 2).sum()
        return total, {"mine": 7.0}

    custom = ours.forward_backward_custom(data, dro).result()
    built_in = theirs.forward_backward(data, "dro").result()
    assert custom.metrics["mine"] == 7.0
    assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
    for name, p in served.adapter(ours).named_parameters().items():
        other = served.adapter(theirs).named_parameters()[name].grad
        torch.testing.assert_close(p.grad, other, atol=1e-5, rtol=1e-4)


def test_a_state_resumes_bit_for_bit_and_weights_alone_start_the_moments_anew(
    served: Served, rows: list[list[int]]
) -> None:
    client = served.training(seed=25, train_mlp=False)
    data = _sft(rows)

    def step(c: tinker.TrainingClient) -> dict[str, torch.Tensor]:
        c.forward_backward(data, "cross_entropy")
        c.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        return {n: p.detach().clone() for n, p in served.adapter(c).named_parameters().items()}

    step(client)
    path = client.save_state("two", user_metadata={"why": "test"}).result().path
    further = step(client)
    full = step(served.service.create_training_client_from_state_with_optimizer(path))
    assert all(torch.equal(full[n], further[n]) for n in further)
    bare = step(served.service.create_training_client_from_state(path))
    assert any(not torch.equal(bare[n], further[n]) for n in further)
    with pytest.raises(RequestFailedError, match="exists already"):
        client.save_state("two").result()
    assert client.save_state("two", overwrite=True).result().path == path


def test_lora_flags_choose_the_layers(served: Served) -> None:
    def layers(**flags: bool) -> set[str]:
        client = served.training(**flags)
        return {path.rsplit(".", 1)[-1] for path in served.adapter(client).slots}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert layers() == attention | mlp | {"lm_head"}
    assert layers(train_mlp=False, train_unembed=False) == attention
    assert layers(train_attn=False, train_unembed=False) == mlp


def test_unknown_models_and_paths_are_refused(served: Served) -> None:
    with pytest.raises(Exception, match="this server has 'earnest/nano'"):
        served.service.create_lora_training_client("Qwen/Qwen3-8B", rank=4)
    with pytest.raises(Exception, match=r"is not an id of a training run"):
        served.service.create_sampling_client(model_path="tinker://nowhere/sampler_weights/x")
    with pytest.raises(Exception, match="LoRA rank is 0"):
        served.training(rank=0)
    client = served.training()
    for name in ("../out", "a/b", ".hidden", "x" * 200):
        with pytest.raises(RequestFailedError, match="the checkpoint name"):
            client.save_state(name).result()
