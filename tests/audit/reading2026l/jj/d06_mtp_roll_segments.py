"""Multi-token prediction rolls over document borders in packed rows. AI-Hypercomputer/maxtext#4623 (also #4600), https://github.com/AI-Hypercomputer/maxtext/pull/4623, 2026.
The MTP block shifts inputs, targets and the target mask left by one for each depth and blanks only the last column of the row. In a packed row the last
position of document A then gets the first target of document B, with mask 1. The extra prediction head is trained on targets of the next document."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "multi-token prediction"
KIND = "loss"
INPUTS = {"inputs": "input token ids of packed rows, [rows, time]", "targets": "next token of the same document at every position, [rows, time] (already shifted by the data pipeline)",
          "target_mask": "1 where targets is trained, 0 for padding, [rows, time]", "segments": "document number within the row, 1, 2, ...; 0 for padding, [rows, time]"}
SETTINGS = {"mtp_weight": "weight of the multi-token-prediction loss, 0.3", "depths": "number of extra prediction depths, 2"}
NOTES = ("Main loss: mean cross entropy of targets over the positions with target_mask 1, of all rows. At depth k = 1..depths position t combines the previous hidden state with the embedding of inputs[t+k] and predicts targets[t+k]; "
         "this is trained only where t+k lies in the same document as t and target_mask[t+k] is 1. The loss of a depth is the mean over its trained positions of all rows; total = main + mtp_weight * mean over depths. "
         "Documents packed into one row are independent: attention is causal within a document, and no target of another document is ever used. Embedding and output head are shared by all depths. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=37, width=24, depths=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mtp = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depths))
        self.head = nn.Linear(width, vocab)
    def hidden(self, ids, seg):
        e = self.emb(ids)
        T = ids.shape[1]
        ok = torch.ones(T, T, dtype=torch.bool).tril() & (seg[:, :, None] == seg[:, None, :])
        a = (self.q(e) @ self.k(e).transpose(1, 2) / e.shape[-1] ** 0.5).masked_fill(~ok, -1e9).softmax(-1)
        return e + a @ self.v(e)

def make(seed):
    torch.manual_seed(seed)
    lens = [[4, 5, 3], [6, 4], [3, 3, 3, 3]]
    T = 12
    inp, tgt = torch.zeros(3, T, dtype=torch.long), torch.zeros(3, T, dtype=torch.long)
    mask, seg = torch.zeros(3, T), torch.zeros(3, T, dtype=torch.long)
    for r, row in enumerate(lens):
        p = 0
        for s, n in enumerate(row, 1):
            doc = torch.randint(1, 37, (n + 1,))
            inp[r, p:p + n], tgt[r, p:p + n], mask[r, p:p + n], seg[r, p:p + n] = doc[:-1], doc[1:], 1.0, s
            p += n
    return {"inputs": inp, "targets": tgt, "target_mask": mask, "segments": seg, "model": LM()}

def _roll(x):
    x = torch.roll(x, -1, 1).clone()
    x[:, -1] = 0
    return x

def _ce(logits, targets, mask):
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(mask.shape)
    return (nll * mask).sum() / mask.sum().clamp_min(1)

def broken(model, batch, mtp_weight=0.3, depths=2):
    ids, tgt, mask = batch["inputs"], batch["targets"], batch["target_mask"]
    h = model.hidden(ids, batch["segments"])
    main = _ce(model.head(h), tgt, mask)
    losses = []
    for k in range(depths):
        ids, tgt, mask = _roll(ids), _roll(tgt), _roll(mask)
        h = torch.tanh(model.mtp[k](torch.cat([h, model.emb(ids)], -1)))
        losses.append(_ce(model.head(h), tgt, mask))
    return main + mtp_weight * torch.stack(losses).mean()

def right(model, batch, mtp_weight=0.3, depths=2):
    ids, tgt, mask = batch["inputs"], batch["targets"], batch["target_mask"]
    seg = rolled = batch["segments"]
    h = model.hidden(ids, seg)
    main = _ce(model.head(h), tgt, mask)
    losses = []
    for k in range(depths):
        ids, tgt, mask, rolled = _roll(ids), _roll(tgt), _roll(mask), _roll(rolled)
        same = (rolled == seg) & (seg > 0)
        h = torch.tanh(model.mtp[k](torch.cat([h, model.emb(ids)], -1)))
        losses.append(_ce(model.head(h), tgt, mask * same))
    return main + mtp_weight * torch.stack(losses).mean()

if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    b, r = broken(m, d), right(m, d)
    # slow: every document alone
    num, den = [0.0] * 3, [0] * 3
    for row in range(3):
        for s in range(1, int(d["segments"][row].max()) + 1):
            w = d["segments"][row] == s
            i, t = d["inputs"][row][w][None], d["targets"][row][w][None]
            n = i.shape[1]
            h = m.hidden(i, torch.ones_like(i))
            num[0] += F.cross_entropy(m.head(h)[0], t[0], reduction="sum").item(); den[0] += n
            for k in (1, 2):
                h = torch.tanh(m.mtp[k - 1](torch.cat([h[:, :n - k], m.emb(i[:, k:])], -1)))
                num[k] += F.cross_entropy(m.head(h)[0], t[0, k:], reduction="sum").item(); den[k] += n - k
    ref = num[0] / den[0] + 0.3 * (num[1] / den[1] + num[2] / den[2]) / 2
    print("slow", ref, "right", r.item(), "broken", b.item()); assert abs(r.item() - ref) < 1e-4 and abs(b.item() - ref) > 1e-3
