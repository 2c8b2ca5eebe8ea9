"""Label smoothing in the fairseq convention: the smoothing mass is spread over the V-1 OTHER tokens (eps/(V-1) each), so the weights are
(1 - eps - eps/(V-1)) on the nll plus eps/(V-1) on the sum over all V. It differs from torch's label_smoothing (eps/V) on purpose;
the true class gets exactly 1-eps (tensor2tensor spreads the mass in the same way)."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 = padding", "target": "ids already shifted by the data loader: target[t] is the token after ids[t]; 0 = padding, not trained"}
SETTINGS = {"eps": "label smoothing, 0.1"}
NOTES = ("Mean over the target tokens that are not padding (id 0), of all rows. The targets come shifted, the loss shifts nothing. Padding id 0 is in the softmax and also gets "
         "smoothing mass, as in fairseq. Metrics: nll in bits per token (base 2), the fairseq convention. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=29, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V)
    def forward(self, ids): return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    full = torch.randint(1, 29, (3, 9)); ids, target = full[:, :-1].clone(), full[:, 1:].clone()
    for i, n in enumerate((8, 5, 3)): ids[i, n:] = 0; target[i, n:] = 0
    return {"model": LM(), "ids": ids, "target": target}

def right(model, batch, eps=0.1):
    lp = model(batch["ids"]).log_softmax(-1).flatten(0, 1)
    y = batch["target"].reshape(-1, 1)
    pad = y.eq(0)
    nll = -lp.gather(1, y).masked_fill(pad, 0.0).sum()
    smooth = -lp.sum(-1, keepdim=True).masked_fill(pad, 0.0).sum()
    n = (~pad).sum()
    eps_i = eps / (lp.size(-1) - 1)
    loss = ((1.0 - eps - eps_i) * nll + eps_i * smooth) / n
    return loss, {"nll_bits": (nll / n / torch.log(torch.tensor(2.0))).item(), "tokens": int(n)}

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l, met = right(m, b); l.backward()
    lp = m(b["ids"]).log_softmax(-1); V = lp.shape[-1]; s = n = 0
    for i in range(3):
        for t in range(8):
            y = int(b["target"][i, t])
            if y == 0: continue
            q = torch.full((V,), 0.1 / (V - 1)); q[y] = 0.9
            assert abs(q.sum() - 1) < 1e-5
            s = s - (q * lp[i, t]).sum(); n += 1
    print(l.item(), (s / n).item(), met, "grad", sum(p.grad.norm().item() for p in m.parameters()))
    assert abs(l - s / n) < 1e-5 and n == met["tokens"] and all(p.grad.norm() > 0 for p in m.parameters())
