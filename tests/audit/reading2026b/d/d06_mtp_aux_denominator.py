"""The balance loss inside each multi-token-prediction depth is divided by the base model's valid-token count.
pytorch/torchtitan#4682, https://github.com/pytorch/torchtitan/issues/4682, 2026 (September).
Each MTP depth has fewer valid tokens than the main head, because targets shifted across a document
end or into padding are dropped. One denominator (the main head's) is used for all auxiliary losses,
so the router loss of the deeper modules is weighted too low, more so for short documents."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'packing'
KIND = 'loss'
INPUTS = {
    'ids': 'token ids of packed rows, [rows, time]',
    'documents': 'document number of each token, -1 on padding, [rows, time]',
}
SETTINGS = {
    'mtp_weight': 'weight of the MTP cross-entropy, 0.3',
    'aux_weight': 'weight of the balance loss, 0.05',
    'top_k': 'experts per token, 1',
}
NOTES = (
    'Main next-token cross-entropy: mean over valid targets. MTP depth k predicts the token k + 1 '
    'ahead in the same document: mean over its own valid targets, averaged over depths. Balance loss '
    'of a depth: mean per valid token of that depth (token sum T*L_bal over the valid-token count), '
    'summed over depths; counts of routed tokens are constants. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


class MTP(Tiny):
    """Tiny with two MTP depths, each a residual mixture of 4 small experts with a router."""
    def __init__(self, vocab=20, width=16, depths=2, experts=4):
        super().__init__(vocab, width)
        self.router = nn.ModuleList(nn.Linear(width, experts) for _ in range(depths))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(experts)) for _ in range(depths))

    def depth(self, k, h, top_k):
        probs = self.router[k](h).softmax(-1)
        w, chosen = probs.topk(top_k, -1)
        weight = torch.zeros_like(probs).scatter(-1, chosen, w)
        y = torch.stack([e(h) for e in self.experts[k]], -1)
        return h + (y * weight[..., None, :]).sum(-1), probs, chosen


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time = 2, 18
    docs = torch.full((rows, time), -1)
    for i in range(rows):
        at, n = 0, 0
        while at < time - 2:
            length = int(torch.randint(2, 7, (1,), generator=g))
            docs[i, at:min(at + length, time - 2)] = n
            at, n = at + length, n + 1
    model = MTP()
    for r in model.router:
        nn.init.normal_(r.weight, std=0.7)
    return {"model": model, "ids": torch.randint(0, 20, (rows, time), generator=g), "documents": docs}


def _loss(model, batch, mtp_weight, aux_weight, top_k, own_denominator):
    ids, docs = batch["ids"], batch["documents"]
    t = ids.shape[1]
    same = (docs[:, :, None] == docs[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
    h = model.hidden(ids, None, same)

    def targets(shift):
        ok = torch.zeros_like(docs, dtype=torch.bool)
        ok[:, :-shift] = (docs[:, shift:] == docs[:, :-shift]) & (docs[:, :-shift] >= 0)
        return torch.where(ok, ids.roll(-shift, 1), torch.full_like(ids, -100)), ok

    labels, ok = targets(1)
    base_valid = ok.sum().clamp(min=1)
    loss = F.cross_entropy(model.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / base_valid
    depths = len(model.router)
    for k in range(depths):
        h, probs, chosen = model.depth(k, h, top_k)
        labels, ok = targets(k + 2)
        valid = ok.sum().clamp(min=1)
        ce = F.cross_entropy(model.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = loss + mtp_weight / depths * ce / valid
        experts = probs.shape[-1]
        hits = F.one_hot(chosen[ok], experts).sum((0, 1)).float()
        f = experts / (top_k * valid) * hits
        p = probs[ok].mean(0)
        token_sum = valid * (f * p).sum()
        loss = loss + aux_weight * token_sum / (valid if own_denominator else base_valid)
    return loss


def broken(model, batch, mtp_weight=0.3, aux_weight=0.05, top_k=1):
    return _loss(model, batch, mtp_weight, aux_weight, top_k, own_denominator=False)


def right(model, batch, mtp_weight=0.3, aux_weight=0.05, top_k=1):
    return _loss(model, batch, mtp_weight, aux_weight, top_k, own_denominator=True)


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    grads = []
    for f in (broken, right):
        model.zero_grad()
        loss = f(model, b)
        loss.backward()
        grads.append(model.router[1].weight.grad.clone())
        print(f.__name__, loss.item(), "router gradient", grads[-1].norm().item())
    assert (broken(model, b) - right(model, b)).abs() > 1e-3
