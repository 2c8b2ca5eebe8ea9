"""ELECTRA: generator MLM loss over the masked places plus 50 times a binary loss of the discriminator over ALL non-padding tokens; a generator sample that happens to equal the original counts as 'original'. No gradient runs from the discriminator to the generator (Clark et al. 2020). The weight 50 and the all-token reduction look odd."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "masked"
KIND = "loss"
INPUTS = {"ids": "original ids, [rows, time]", "masked": "ids with 0 (MASK) at chosen places", "attention": "1 on real tokens", "gumbel": "stored Gumbel noise for the generator's samples, [rows, time, vocabulary]"}
SETTINGS = {"weight": "of the discriminator, 50.0", "mask_id": "0"}
NOTES = "MLM: mean over masked tokens of all rows. Discriminator: mean over attended tokens of all rows. The sampling is an argmax with stored noise, so the loss is deterministic; samples have no gradient. Token embeddings are shared. All parameters used."


class Electra(nn.Module):
    def __init__(self, vocab=31, width=16, max_len=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.gen, self.gen_head = nn.Linear(2 * width, width), nn.Linear(width, vocab)
        self.dis, self.dis_head = nn.Linear(2 * width, width), nn.Linear(width, 1)

    def encode(self, ids, att, layer):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        c = (x * att[..., None]).sum(1, keepdim=True) / att.sum(1)[:, None, None]
        return torch.tanh(layer(torch.cat([x, c.expand_as(x)], -1)))

    def forward(self, ids, att):
        return self.gen_head(self.encode(ids, att, self.gen))

    def discriminate(self, ids, att):
        return self.dis_head(self.encode(ids, att, self.dis))[..., 0]


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 31, (4, 12))
    att = torch.ones(4, 12)
    att[1, 9:], att[3, 7:] = 0, 0
    hide = (torch.rand(4, 12) < 0.3) & (att > 0)
    hide[:, 2] = True
    g = -torch.log(-torch.log(torch.rand(4, 12, 31).clamp(1e-6, 1 - 1e-6)))
    return {"model": Electra(), "ids": ids, "masked": ids.masked_fill(hide, 0), "attention": att, "gumbel": g}


def right(model, batch, weight=50.0, mask_id=0):
    ids, att = batch["ids"], batch["attention"]
    hidden = batch["masked"] == mask_id
    logits = model(batch["masked"], att)
    mlm = F.cross_entropy(logits[hidden], ids[hidden])
    sample = (logits.detach() + batch["gumbel"]).argmax(-1)
    corrupt = torch.where(hidden, sample, ids)
    replaced = (corrupt != ids).to(logits.dtype)
    bce = F.binary_cross_entropy_with_logits(model.discriminate(corrupt, att), replaced, reduction="none")
    rtd = (bce * att).sum() / att.sum()
    return mlm + weight * rtd, {"mlm": mlm.detach(), "rtd": rtd.detach()}


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lg = model(d["masked"], d["attention"]).detach()
    a = b = na = nb = 0.0
    cor = d["ids"].clone()
    for i in range(4):
        for t in range(12):
            if d["masked"][i, t] == 0:
                a -= float(lg[i, t].log_softmax(-1)[d["ids"][i, t]])
                na += 1
                cor[i, t] = int((lg[i, t] + d["gumbel"][i, t]).argmax())
    z = model.discriminate(cor, d["attention"]).detach()
    for i in range(4):
        for t in range(12):
            if d["attention"][i, t]:
                p = 1 / (1 + math.exp(-float(z[i, t])))
                b -= math.log(p if cor[i, t] != d["ids"][i, t] else 1 - p)
                nb += 1
    want = a / na + 50 * b / nb
    assert abs(float(loss) - want) < 1e-3 and not dead, dead
    print("ok", float(loss), want, out[1])
