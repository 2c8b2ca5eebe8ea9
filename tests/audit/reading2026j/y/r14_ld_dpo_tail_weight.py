"""LD-DPO: the tokens of the LONGER answer beyond the length of the shorter one count only alpha (here 0.4) in the log-probability, for policy and reference alike. So chosen and rejected tokens are weighted unequally, and the weights of
a row depend on its partner. Liu et al. 2024 (length-desensitised DPO); TRL ld_alpha."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [pairs, 2, time]; [:, 0] chosen, [:, 1] rejected; right padded with 0",
          "completion_mask": "1 on answer tokens, [pairs, 2, time]; both answers of a pair begin at the same position (same prompt)",
          "ref_token_logps": "per-token log-probabilities of ids[..., 1:] under the reference, [pairs, 2, time-1], constant"}
SETTINGS = {"beta": "DPO strength, 0.1", "ld_alpha": "weight of the tokens beyond the common length, 0.4 (1.0 is DPO, 0.0 cuts the tail)"}
NOTES = ("Preference loss (DPO family). Reduction: weighted sum over answer tokens, mean over pairs. The tail weight multiplies policy and reference log-probabilities alike. "
         "Pairs lie along dimension 0. ref_token_logps is constant. All parameters are used. Any number of pairs.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def token_logps(logits, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 ... time-1."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    pairs, time = 5, 12
    ids, mask = torch.zeros(pairs, 2, time, dtype=torch.long), torch.zeros(pairs, 2, time)
    for i in range(pairs):
        p = int(torch.randint(2, 5, (1,), generator=g))
        prompt = torch.randint(1, 32, (p,), generator=g)
        for s in range(2):
            n = int(torch.randint(2, time - p + 1, (1,), generator=g))
            ids[i, s, :p + n] = torch.cat([prompt, torch.randint(1, 32, (n,), generator=g)])
            mask[i, s, p:p + n] = 1.0
    model = TinyLM()
    with torch.no_grad():
        flat = ids.flatten(0, 1)
        ref = token_logps(model(flat), flat).view(pairs, 2, time - 1) + 0.5 * torch.randn(pairs, 2, time - 1, generator=g)
    return {"model": model, "ids": ids, "completion_mask": mask, "ref_token_logps": ref}


def right(model, batch, beta=0.1, ld_alpha=0.4):
    flat, mask = batch["ids"].flatten(0, 1), batch["completion_mask"][..., 1:]
    logp = token_logps(model(flat), flat).view(mask.shape)
    public = mask.sum(-1).min(1).values                                   # [pairs], the common length
    index = mask.cumsum(-1)                                               # 1, 2, ... on the answer
    weight = mask * torch.where(index <= public[:, None, None], torch.ones_like(mask), ld_alpha * torch.ones_like(mask))
    ratio = ((logp - batch["ref_token_logps"]) * weight).sum(-1)
    return -nn.functional.logsigmoid(beta * (ratio[:, 0] - ratio[:, 1])).mean()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, slow = right(model, d), 0.0
    for i in range(5):
        seqs = []
        for s in range(2):
            seqs.append([model(d["ids"][i, s, :t][None])[0, -1].log_softmax(-1)[d["ids"][i, s, t]] - d["ref_token_logps"][i, s, t - 1]
                         for t in range(1, 12) if d["completion_mask"][i, s, t] == 1])
        m = min(len(x) for x in seqs)
        print("lengths", [len(x) for x in seqs], end="; ")
        c, r = [sum(x[:m]) + 0.4 * sum(x[m:]) for x in seqs]
        slow = slow + torch.log(1 + torch.exp(-0.1 * (c - r))) / 5
    g1, g2 = grads(loss, model), grads(slow, model)
    print("\nloss", loss.item(), "explicit", slow.item(), "gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
