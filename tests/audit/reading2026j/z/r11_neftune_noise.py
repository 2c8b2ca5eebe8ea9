"""NEFTune (Jain et al. 2023): uniform noise in [-1,1] * alpha / sqrt(L * d) is added to the input embeddings in training mode only, with L the real length of each row. Two calls on the same batch give different losses,
by design; in eval mode the loss is the plain one, and the noise gets no gradient."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "attention_mask": "1 for real tokens, right padding, [rows, time]", "labels": "[rows, time], not shifted, -100 where not trained"}
SETTINGS = {"alpha": "noise scale, 5.0"}
NOTES = ("Next-token CE, mean over trained tokens of all rows. Random in model.train() (global torch generator), exact in model.eval(). L counts the real tokens of the row, so right padding does not change the scale "
         "(the authors' code; TRL takes the padded length). The noise is a constant. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=29, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V)
    def forward(self, inputs_embeds): return self.head(self.rnn(inputs_embeds)[0])

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 29, (3, 10)); am = torch.ones_like(ids); am[1, 7:] = 0; am[2, 5:] = 0; ids = ids * am
    labels = ids.masked_fill(am == 0, -100); labels[:, :2] = -100
    return {"model": LM(), "ids": ids, "attention_mask": am, "labels": labels}

def right(model, batch, alpha=5.0):
    e = model.emb(batch["ids"])
    if model.training:
        L = batch["attention_mask"].sum(1).to(e.dtype)
        mag = alpha / torch.sqrt(L * e.shape[-1])
        noise = torch.empty_like(e).uniform_(-1, 1) * mag[:, None, None]
        e = e + noise
    logits = model(e)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); m.train(); torch.manual_seed(7); l = right(m, b); l.backward()
    torch.manual_seed(7); u = torch.rand(3, 10, 16) * 2 - 1; s = n = 0; s0 = 0
    for i in range(3):
        L = int(b["attention_mask"][i].sum()); x = m.emb(b["ids"][i, :L])
        lp = m((x + u[i, :L] * 5.0 / (L * 16) ** 0.5)[None])[0].log_softmax(-1); lp0 = m(x[None])[0].log_softmax(-1)
        for t in range(2, L): s += -lp[t - 1, b["ids"][i, t]].item(); s0 += -lp0[t - 1, b["ids"][i, t]].item(); n += 1
    g = [p.grad.norm().item() for p in m.parameters()]; m.eval(); e = right(m, b).item()
    print("train", l.item(), s / n, "eval", e, s0 / n, "grads", g)
    assert abs(l.item() - s / n) < 1e-5 and abs(e - s0 / n) < 1e-5 and min(g) > 0 and e == right(m, b).item()
