"""One row holds a prompt once and several answers behind it: positions repeat, answers do not see each other, and the first token of each answer is predicted from the prompt's last token, far to the left.
Right: prefix sharing for group sampling; the loss equals that of separate prompt + answer rows at a fraction of the tokens."""
import torch
import torch.nn as nn

FAMILY = "packing"
KIND = "loss"
INPUTS = {
    "ids": "prompt, then all answers, one row, [time]", "segment": "0 for the prompt, 1.. for the answers, [time]",
    "position_ids": "position in prompt + own answer, [time]", "source": "index of the position whose output predicts this token, -1 for prompt tokens, [time]",
    "advantages": "one for each answer, [answers]",
}
SETTINGS = {}
NOTES = "Policy gradient, -advantage * log p, mean over the tokens of each answer, then mean over answers. The prompt is not trained. Advantages are constants."


class LM(nn.Module):
    def __init__(self, V=32, D=16):
        super().__init__()
        self.emb, self.pos, self.qkv, self.out = nn.Embedding(V, D), nn.Embedding(40, D), nn.Linear(D, 3 * D), nn.Linear(D, V)

    def forward(self, ids, pos, keep):
        h = self.emb(ids) + self.pos(pos)
        q, k, v = self.qkv(h).chunk(3, -1)
        s = (q @ k.t() / 4).masked_fill(~keep, float("-inf"))
        return self.out(h + s.softmax(-1) @ v)


def right(model, batch):
    ids, seg, src = batch["ids"], batch["segment"], batch["source"]
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    keep = causal & ((seg[None, :] == 0) | (seg[None, :] == seg[:, None]))
    lp = model(ids, batch["position_ids"], keep).log_softmax(-1)
    t = (src >= 0).nonzero().flatten()
    tok = lp[src[t], ids[t]]
    n = len(batch["advantages"])
    k = seg[t] - 1
    count = torch.bincount(k, minlength=n)
    return -(tok * batch["advantages"][k] / count[k]).sum() / n


def make(seed):
    torch.manual_seed(seed)
    P, lens = 5, [3, 6, 4]
    ids, seg, pos, src = [torch.randint(0, 32, (P,))], [torch.zeros(P, dtype=torch.long)], [torch.arange(P)], [torch.full((P,), -1)]
    at = P
    for k, n in enumerate(lens):
        ids.append(torch.randint(0, 32, (n,)))
        seg.append(torch.full((n,), k + 1))
        pos.append(torch.arange(P, P + n))
        src.append(torch.cat([torch.tensor([P - 1]), torch.arange(at, at + n - 1)]))
        at += n
    c = torch.cat
    return {"model": LM(), "ids": c(ids), "segment": c(seg), "position_ids": c(pos), "source": c(src), "advantages": torch.randn(3)}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    loss = right(m, x)
    loss.backward()
    tot = 0.0
    for k in range(3):
        i = ((x["segment"] == 0) | (x["segment"] == k + 1)).nonzero().flatten()
        ids = x["ids"][i]
        T = len(ids)
        lp = m(ids, torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril()).log_softmax(-1)
        tot += -(x["advantages"][k] * lp[torch.arange(4, T - 1), ids[5:]].mean()).item() / 3
    print("shared prompt", loss.item(), "separate rows", tot, "gradient", m.qkv.weight.grad.norm().item())
    assert abs(loss.item() - tot) < 1e-5
