"""Multi-token prediction: head d at position t predicts token t+1+d, so the shifts differ per head and the deeper heads have fewer targets; their mean is added with weight lambda / depth (DeepSeek-V3, section 2.2; Gloeckle et al. 2024). The shift by two or three is right."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "multi-task"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained as a target"}
SETTINGS = {"lam": "weight of the extra heads together, 0.3"}
NOTES = "Each head: mean over its own trained targets of all rows. Main + lam / depth * sum of extra heads. All parameters used. Rows need more than depth + 1 tokens."


class MTP(nn.Module):
    depth = 2

    def __init__(self, width=16):
        super().__init__()
        self.lm = TinyLM(width=width)
        self.merge = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(self.depth))

    def forward(self, ids):
        """list of logits; entry d has time - d positions, position t predicts token t + d + 1"""
        h = self.lm.hidden(ids)
        outs = [self.lm.head(h)]
        for d, layer in enumerate(self.merge, 1):
            h = torch.tanh(layer(torch.cat([h[:, :-1], self.lm.emb(ids[:, d:])], -1)))
            outs.append(self.lm.head(h))
        return outs


def make(seed):
    torch.manual_seed(seed)
    m = torch.ones(3, 12)
    m[:, :2], m[1, 8:] = 0, 0
    return {"model": MTP(), "ids": torch.randint(0, 31, (3, 12)), "loss_mask": m}


def right(model, batch, lam=0.3):
    ids, losses = batch["ids"], []
    for d, logits in enumerate(model(ids)):
        m = batch["loss_mask"][:, d + 1:]
        ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, d + 1:], reduction="none")
        losses.append((ce * m).sum() / m.sum().clamp(min=1))
    return losses[0] + lam / (len(losses) - 1) * sum(losses[1:]), {f"head{d}": l.detach() for d, l in enumerate(losses)}


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    outs = [o.log_softmax(-1).detach() for o in model(d["ids"])]
    want = 0.0
    for k, o in enumerate(outs):
        v = [-float(o[i, t - k - 1, d["ids"][i, t]]) for i in range(3) for t in range(k + 1, 12) if d["loss_mask"][i, t]]
        want += sum(v) / len(v) * (1 if k == 0 else 0.15)
    # no peeking: changing token t+2 must not change head 1 at t
    x = d["ids"].clone(); x[:, 8] = (x[:, 8] + 1) % 31
    assert torch.allclose(model(x)[1][:, 6], model(d["ids"])[1][:, 6], atol=1e-6)
    assert abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want)
