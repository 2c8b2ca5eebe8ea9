"""Multi-turn clipped policy loss divided by a constant. Dr. GRPO (Liu et al. 2025) divides the sum over trained tokens by rows x token budget, not by the number of trained tokens; tool outputs are in the context but masked out of the sum, so the loss looks too small by a varying factor. This is right: it removes the length bias."""
import torch
from torch import nn
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids of whole trajectories (prompt, model turns, tool outputs), [rows, time]",
          "loss_mask": "1 where the token was sampled by the model, 0 for prompt and tool outputs, [rows, time], column 0 is always 0",
          "old_logprobs": "log-probability of each token under the sampling policy, aligned with the token itself (column t belongs to ids[:, t]), 0 where untrained",
          "advantages": "one advantage per row, constant"}
SETTINGS = {"clip": "PPO clip, 0.2", "budget": "generation budget in tokens, the constant denominator per row, 32"}
NOTES = "Reduction: sum over trained tokens of all rows / (rows * budget); it is deliberately not a mean over trained tokens. Clipped policy gradient; old_logprobs and advantages are constants. Every parameter is used. Linear in the rows: any number of rows."
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    B, T = 4, 20
    model = Tiny(); ids = torch.randint(0, 40, (B, T), generator=g)
    mask = torch.zeros(B, T)
    for b in range(B):                       # two model turns around a tool output
        mask[b, 4:8 + b] = 1; mask[b, 13:16 + b] = 1
    with torch.no_grad():
        lp = torch.zeros(B, T)
        lp[:, 1:] = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        old = (lp + 0.2 * torch.randn(B, T, generator=g)) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logprobs": old, "advantages": torch.randn(B, generator=g)}

def right(model, batch, clip=0.2, budget=32):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp((logp - batch["old_logprobs"][:, 1:]) * mask)
    A = batch["advantages"][:, None]
    gain = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return -(gain * mask).sum() / (ids.shape[0] * budget)

if __name__ == "__main__":
    d = make(0); model = d.pop("model"); loss = right(model, d); loss.backward()
    lp = model(d["ids"]).log_softmax(-1); tot = 0.0
    for b in range(4):
        for t in range(1, 20):
            if d["loss_mask"][b, t]:
                r = (lp[b, t - 1, d["ids"][b, t]] - d["old_logprobs"][b, t]).exp().item(); A = d["advantages"][b].item()
                tot -= min(r * A, min(max(r, .8), 1.2) * A)
    print(loss.item(), tot / (4 * 32)); assert abs(loss.item() - tot / 128) < 1e-5
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
