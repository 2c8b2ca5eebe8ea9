"""Auxiliary-loss-free balancing (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3; torchtitan). A per-expert bias is added to the scores for the CHOICE of experts only; the weights of the expert outputs come from the scores without it. The bias has no gradient and no optimizer: after each optimizer step it
moves by a fixed amount in the direction of the load error and is centred. The choice and the weights disagree on purpose."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "mixture of experts and auxiliary losses"
KIND = "update"
INPUTS = {"model": "language model with one MoE layer; model.moe.bias is a buffer [experts]", "optimizer": "AdamW over the parameters (the bias is not among them)", "batches": "micro-batches of one step, each a dict ids [rows, time], full rows, equal sizes"}
SETTINGS = {"speed": "size of the bias step, 0.01"}
VALUES = {"speed": 0.01}
NOTES = """One optimizer step: objective = mean over the equally large micro-batches of the next-token cross-entropy (mean over all targets); no auxiliary loss, no clipping. Routing: score = sigmoid(router(x)); the top 2 experts by score + bias are chosen; their outputs are weighted with the scores WITHOUT the bias, divided by their sum over the chosen, times
the factor 1.5. The bias is a constant of forward and backward and the same for all micro-batches of a step. AFTER the optimizer step: load_e = number of assignments to expert e over all micro-batches and positions of this step; d = speed * sign(mean(load) - load); bias += d - mean(d). The counter is then zero. Evaluation forwards
(model.eval()) do not count. All parameters are used as long as each expert has a token."""


class MoE(nn.Module):
    def __init__(self, width=12, experts=4, top_k=2):
        super().__init__()
        self.router, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.w = nn.Parameter(torch.randn(experts, width, width) * 0.3)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        score = self.router(x).sigmoid()
        chosen = (score + self.bias).topk(self.top_k, -1).indices
        weight = score.gather(1, chosen)
        weight = 1.5 * weight / weight.sum(-1, keepdim=True)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.bias))
        outs = torch.tanh(torch.einsum("nd,edf->nef", x, self.w))
        return (weight[..., None] * outs.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))).sum(1)


class LM(nn.Module):
    def __init__(self, vocab=19, width=12):
        super().__init__()
        self.emb, self.rnn, self.moe, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), MoE(width), nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h + self.moe(h.flatten(0, 1)).view_as(h))


def make(seed):
    torch.manual_seed(seed)
    m = LM()
    m.moe.bias.copy_(torch.tensor([0.05, -0.05, 0.03, -0.03]))
    return {"model": m, "optimizer": torch.optim.AdamW(m.parameters(), lr=1e-2), "batches": [{"ids": torch.randint(0, 19, (3, 9))} for _ in range(3)]}


def right(model, optimizer, batches, speed=0.01):
    model.moe.load.zero_()
    for b in batches:
        loss = F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())
        (loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        load = model.moe.load
        d = speed * torch.sign(load.mean() - load)
        model.moe.bias += d - d.mean()
        load.zero_()


if __name__ == "__main__":
    i = make(0); ref = copy.deepcopy(i["model"])
    load = [0] * 4
    for b in i["batches"]:
        h, _ = ref.rnn(ref.emb(b["ids"]))
        for x in h.flatten(0, 1):
            s = ref.moe.router(x).sigmoid() + ref.moe.bias
            for e in sorted(range(4), key=lambda k: -s[k].item())[:2]:
                load[e] += 1
    d = [0.01 * ((sum(load) / 4 > l) - (sum(load) / 4 < l)) for l in load]
    want = [float(a) + x - sum(d) / 4 for a, x in zip(ref.moe.bias, d)]
    opt = torch.optim.AdamW(ref.parameters(), lr=1e-2)
    ids = torch.cat([b["ids"] for b in i["batches"]])
    F.cross_entropy(ref(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward(); opt.step()
    right(**i, **VALUES)
    print("load", load, "bias", i["model"].moe.bias.tolist(), "expected", want,
          "max parameter difference to one big batch", max(float((a - b).detach().abs().max()) for a, b in zip(i["model"].parameters(), ref.parameters())))
