"""MoE load-balancing loss with GLOBAL expert frequencies and LOCAL gate means: each rank multiplies its own mean gate probability with the
expert frequency that is all-reduced over ranks (Qwen, 'Demons in the Detail', 2025; Megatron global aux loss). Mixing two
reductions looks wrong, but the loss is linear in the gate means, so the mean over equal ranks is exactly the global-batch loss."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; no padding"}
SETTINGS = {"ranks": "ranks that split the rows, 2", "aux": "weight of the load-balancing loss, 0.01"}
NOTES = ("Loss: next-token cross entropy (mean over all next tokens) + aux * experts * sum_e f_e * P_e; top-2 of 4 experts. "
         "f_e: share of the routing slots that chose expert e over all ranks, a constant (counts, no gradient); P_e: mean softmax gate over the rank's tokens. "
         "The auxiliary part is not separable over rows (product of two means). Router runs over all input positions (time-1). rows must be divisible by ranks. "
         "All parameters are used as long as each expert gets a token.")


class MoE(torch.nn.Module):
    def __init__(self, vocab=27, width=12, experts=4, top=2):
        super().__init__()
        self.top = top
        self.emb = torch.nn.Embedding(vocab, width)
        self.gate = torch.nn.Linear(width, experts, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))
        self.out = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        h = h + h.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        prob = self.gate(h).softmax(-1)
        w, idx = prob.topk(self.top, -1)
        w = w / w.sum(-1, keepdim=True)
        y = 0
        for e, f in enumerate(self.experts):
            y = y + (w * (idx == e)).sum(-1, keepdim=True) * torch.tanh(f(h))
        return self.out(h + y), prob, idx


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": MoE(), "ids": torch.randint(0, 27, (6, 12), generator=g)}


def right(model, batch, ranks=2, aux=0.01):
    assert batch["ids"].shape[0] % ranks == 0
    shards = batch["ids"].chunk(ranks)
    outs = [model(x[:, :-1]) for x in shards]
    experts = outs[0][1].shape[-1]
    counts = sum(torch.bincount(idx.flatten(), minlength=experts) for _, _, idx in outs).float()   # all-reduce SUM
    freq = counts / counts.sum()
    losses = []
    for (logits, prob, _), x in zip(outs, shards):
        ce = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        losses.append(ce + aux * experts * (freq * prob.flatten(0, 1).mean(0)).sum())
    loss = torch.stack(losses).mean()                                                                # DDP mean
    return loss, {"max_expert_share": freq.max().item()}


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        for w in (1, 2, 3, 6):
            model.zero_grad()
            loss, m = right(model, d, ranks=w, aux=0.5)
            loss.backward()
            grad = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            logits, prob, idx = model(d["ids"][:, :-1])
            lp = logits.log_softmax(-1)
            ce, n, P, f = 0, 0, torch.zeros(4), torch.zeros(4)
            for i in range(6):
                for t in range(11):
                    ce, n, P = ce - lp[i, t, d["ids"][i, t + 1]], n + 1, P + prob[i, t]
                    for e in idx[i, t].tolist():
                        f[e] += 1
            ref = ce / n + 0.5 * 4 * sum(f[e] / (2 * n) * P[e] / n for e in range(4))
            ref.backward()
            err = max((a - p.grad).abs().max().item() for a, p in zip(grad, model.parameters()))
            print(f"W={w} loss {loss:.6f} loop {ref:.6f} grad error {err:.1e} max share {m['max_expert_share']:.2f}")
            assert abs(loss - ref) < 1e-5 and err < 1e-5 and all(g.abs().sum() > 0 for g in grad)
