"""Importance ratio between log-probs over different supports. huggingface/trl#7269,
https://github.com/huggingface/trl/pull/7269 (issue 6789), 2026. With top-p / top-k sampling the engine's log-probs are
normalised over the kept tokens, while the trainer recomputes them over the full vocabulary. exp(logp_trainer -
logp_engine) then carries the kept probability mass of each position as a factor although the policy did not change. The
fix replays the kept token set and normalises the trainer's log-prob over it."""
FAMILY = "losses"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "prompt and completion, [rows, time]", "completion_mask": "1 on sampled tokens, [rows, time]",
          "sampling_logps": "log-prob the engine sampled each token with, normalised over the kept tokens, [rows, time - 1], constant",
          "kept": "1 for the vocabulary entries that survived the truncation, [rows, time - 1, vocabulary], constant",
          "advantages": "one per row, [rows], constant"}
SETTINGS = {"cap": "upper bound of the importance ratio, 3.0"}
NOTES = ("Policy gradient with a truncated importance ratio trainer / engine as a constant weight (token level), mean over "
         "sampled tokens of all rows. With equal weights in trainer and engine all ratios are 1. The policy-gradient term "
         "itself uses the full-vocabulary log-prob.")


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
    rows, prompt, time, keep = 4, 4, 12, 8
    model = TinyLM()
    with torch.no_grad():
        model.head.weight.mul_(3.0)
    ids = torch.randint(0, 29, (rows, time))
    sampling, kept = torch.zeros(rows, time - 1), torch.ones(rows, time - 1, 29, dtype=torch.long)
    with torch.no_grad():
        for t in range(prompt, time):
            logits = model(ids[:, :t])[:, -1]
            top = logits.topk(keep, -1).indices
            allowed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, top, True)
            logp = logits.masked_fill(~allowed, -1e9).log_softmax(-1)
            ids[:, t] = torch.multinomial(logp.exp(), 1)[:, 0]
            sampling[:, t - 1] = logp.gather(1, ids[:, t:t + 1])[:, 0]
            kept[:, t - 1] = allowed.long()
    mask = torch.zeros_like(ids)
    mask[:, prompt:] = 1
    return {"model": model, "ids": ids, "completion_mask": mask, "sampling_logps": sampling, "kept": kept,
            "advantages": torch.randn(rows)}


def _loss(model, batch, cap, on_support):
    ids, mask = batch["ids"], batch["completion_mask"][:, 1:].float()
    logits = model(ids)[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    trainer = logp.detach()
    if on_support:
        inside = logits.detach().masked_fill(batch["kept"] == 0, -1e9)
        trainer = inside.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (trainer - batch["sampling_logps"]).exp().clamp(max=cap)
    loss = -(ratio * batch["advantages"][:, None] * logp * mask).sum() / mask.sum()
    return loss, {"ratio": ((ratio * mask).sum() / mask.sum()).item()}


def broken(model, batch, cap=3.0):
    return _loss(model, batch, cap, on_support=False)


def right(model, batch, cap=3.0):
    return _loss(model, batch, cap, on_support=True)


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
    for fn in (broken, right):
        data = make(0)
        print(fn.__name__, "mean ratio", fn(data.pop("model"), data)[1]["ratio"])
