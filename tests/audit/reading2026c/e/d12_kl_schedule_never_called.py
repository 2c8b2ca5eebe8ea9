"""A configured KL schedule that the batched trainer never asks for. tier4/Diffusion-Planner#52,
https://github.com/tier4/Diffusion-Planner/pull/52, 2026. GRPOConfig.get_kl_coef(epoch) implements constant, linear and
cosine schedules of the KL coefficient, but the batched trainer used config.kl_coef directly, so runs with a cosine or
linear schedule silently had a constant coefficient. The fix passes the epoch and applies the scheduled value."""
FAMILY = "schedules"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on sampled tokens, [rows, time]",
          "advantages": "one per row, [rows], constant", "ref_logps": "reference log-prob of each token, [rows, time - 1], constant"}
SETTINGS = {"epoch": "epoch, from 1, 7", "total_epochs": "epochs of the run, 10", "kl_coef": "initial KL coefficient, 0.2",
            "kl_coef_end": "final KL coefficient, 0.02", "kl_schedule": "constant, linear or cosine; cosine"}
NOTES = ("Policy gradient plus KL (k3 estimator), mean over sampled tokens of all rows. The KL coefficient goes from "
         "kl_coef at the first epoch to kl_coef_end at the last along the schedule.")
import math


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 29, (4, 10))
    loss_mask = torch.ones_like(ids)
    loss_mask[:, :4] = 0
    with torch.no_grad():
        ref = TinyLM()(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return {"model": TinyLM(), "ids": ids, "loss_mask": loss_mask, "advantages": torch.randn(4), "ref_logps": ref}


def get_kl_coef(epoch, total_epochs, kl_coef, kl_coef_end, kl_schedule):
    x = (epoch - 1) / max(1, total_epochs - 1)
    if kl_schedule == "linear":
        return kl_coef + (kl_coef_end - kl_coef) * x
    if kl_schedule == "cosine":
        return kl_coef_end + (kl_coef - kl_coef_end) * 0.5 * (1 + math.cos(math.pi * x))
    return kl_coef


def _loss(model, batch, coef):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:].float()
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    diff = batch["ref_logps"] - logp
    kl = diff.exp() - diff - 1
    per_token = -batch["advantages"][:, None] * (logp - logp.detach()).exp() + coef * kl
    return (per_token * mask).sum() / mask.sum(), {"kl": (kl * mask).sum().item() / mask.sum().item()}


def broken(model, batch, epoch=7, total_epochs=10, kl_coef=0.2, kl_coef_end=0.02, kl_schedule="cosine"):
    return _loss(model, batch, kl_coef)


def right(model, batch, epoch=7, total_epochs=10, kl_coef=0.2, kl_coef_end=0.02, kl_schedule="cosine"):
    return _loss(model, batch, get_kl_coef(epoch, total_epochs, kl_coef, kl_coef_end, kl_schedule))


if __name__ == "__main__":
    values, grads = {}, {}
    for name, fn in (("broken", broken), ("right", right)):
        data = make(0)
        model = data.pop("model")
        loss = fn(model, data)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        values[name] = loss.item()
        grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    print("loss", values)
    gap = (grads["broken"] - grads["right"]).norm() / grads["right"].norm()
    print("relative gradient gap", gap.item())
    assert gap > 1e-3
