"""GSPO leaks masked tokens through batch centering and is not sequence-level. MakazhanAlpamys/Soup#723,
https://github.com/MakazhanAlpamys/Soup/issues/723, 2026 (fix MakazhanAlpamys/Soup#744). The 'gspo' loss centres each token
log-ratio over the rows of the batch before the completion mask is applied. Padding therefore changes the loss of the other
rows and gets a gradient, and the ratio is not the length-normalised ratio of the sequence that the paper defines."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids of prompt, completion and right padding, [rows, time]",
    "loss_mask": "1 where the token is a completion token, 0 on prompt and padding, [rows, time]",
    "old_logps": "log-prob of each token under the policy that sampled it, [rows, time], aligned with ids (entry t belongs to token t, entry 0 unused); arbitrary where loss_mask is 0",
    "advantages": "one advantage per row, [rows]",
}
SETTINGS = {"clip": "half-width of the clip range of the sequence ratio, 0.2"}
NOTES = ("GSPO. For each row the sequence ratio s = exp(mean over its completion tokens of (logp - old_logp)). Loss of the row: "
         "-min(s * A, clip(s, 1-clip, 1+clip) * A); the loss is the mean over the rows that have a completion token (each row weighs the same, whatever its length). "
         "Each row depends on its own completion tokens only. old_logps and advantages are constants. The log-prob of token t is read from the logits at t-1. "
         "All parameters of the model are used. Any number of rows.")

V = 24


class TinyLM(nn.Module):
    """A causal model: ids [rows, time] -> logits [rows, time, V]; the logits at t see the tokens up to t."""

    def __init__(self, width=16):
        super().__init__()
        self.emb = nn.Embedding(V, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def token_logps(model, ids):
    """log-prob of each token given the ones before it, [rows, time]; entry 0 is 0 (nothing predicts it)"""
    lp = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(1, V, (4, 9), generator=g)
    mask = torch.zeros(4, 9)
    for i, n in enumerate([7, 5, 4, 6]):
        mask[i, 2:2 + n] = 1
        ids[i, 2 + n:] = 0
    with torch.no_grad():
        old = token_logps(model, ids)
    old = old + 0.15 * torch.randn(4, 9, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.tensor([1.0, -0.5, 0.7, -1.2])}


def broken(model, batch, clip=0.2):
    logp, m = token_logps(model, batch["ids"])[:, 1:], batch["loss_mask"][:, 1:]
    log_ratio = logp - batch["old_logps"][:, 1:]
    log_ratio = log_ratio - log_ratio.mean(dim=0, keepdim=True)
    token_loss = -(log_ratio.exp() * batch["advantages"][:, None])
    return (token_loss * m).sum() / m.sum().clamp(min=1)


def right(model, batch, clip=0.2):
    logp, m = token_logps(model, batch["ids"])[:, 1:], batch["loss_mask"][:, 1:]
    n = m.sum(1)
    s = (((logp - batch["old_logps"][:, 1:]) * m).sum(1) / n.clamp(min=1)).exp()
    A = batch["advantages"]
    row = -torch.minimum(s * A, s.clamp(1 - clip, 1 + clip) * A)
    has = (n > 0).to(row.dtype)
    return (row * has).sum() / has.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    c = {k: v.clone() for k, v in b.items()}
    c["old_logps"][2, 7:] += 3.0                      # padding of row 2
    for f in (broken, right):
        model.zero_grad(); l = f(model, b); l.backward()
        print(f.__name__, l.item(), "after a change in the padding:", f(model, c).item(), "grad", model.out.weight.grad.norm().item())
    assert abs(right(model, b) - right(model, c)) < 1e-7 and abs(broken(model, b) - broken(model, c)) > 1e-3
