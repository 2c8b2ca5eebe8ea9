"""TDPO2: inside the DPO margin stands the difference of the two answers' sequential KL to the reference, but ONLY the chosen one's KL is detached; the rejected one's carries a gradient. The asymmetry (and KL(ref || policy), forward) is
the published method: Zeng et al. 2024, 'Token-level direct preference optimization', tdpo_loss with if_tdpo2."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2 * pairs, time]: chosen half first, then the rejected rows in the same order; right padded with 0",
          "completion_mask": "1 on answer tokens, [2 * pairs, time]",
          "ref_logprobs": "log-softmax of the frozen reference over the vocabulary at every position, [2 * pairs, time, vocab], constant"}
SETTINGS = {"beta": "DPO strength, 0.1", "alpha": "weight of the sequential KL difference, 0.5"}
NOTES = ("Preference loss (token-level DPO). Reduction: sums over answer tokens for log-ratio and KL, mean over pairs. The chosen KL is a stop-gradient by design, the rejected KL is differentiated. "
         "ref_logprobs is constant and normalised. Even number of rows, chosen half first. All parameters are used.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_groups(g, groups, size, time, vocab):
    """[groups, size, time]: the rows of a group share one prompt; right padded; mask is 1 on the completion."""
    ids, mask = torch.zeros(groups, size, time, dtype=torch.long), torch.zeros(groups, size, time)
    for i in range(groups):
        p = int(torch.randint(2, 4, (1,), generator=g))
        prompt = torch.randint(1, vocab, (p,), generator=g)
        for s in range(size):
            end = int(torch.randint(p + 2, time + 1, (1,), generator=g))
            ids[i, s, :end] = torch.cat([prompt, torch.randint(1, vocab, (end - p,), generator=g)])
            mask[i, s, p:end] = 1.0
    return ids, mask

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_groups(g, 4, 2, 10, 32)
    ids, mask = ids.transpose(0, 1).flatten(0, 1), mask.transpose(0, 1).flatten(0, 1)     # chosen half, rejected half
    model = TinyLM()
    with torch.no_grad():
        ref = (model(ids) + 0.7 * torch.randn(8, 10, 32, generator=g)).log_softmax(-1)
    return {"model": model, "ids": ids, "completion_mask": mask, "ref_logprobs": ref}


def right(model, batch, beta=0.1, alpha=0.5):
    target, mask = batch["ids"][:, 1:].unsqueeze(-1), batch["completion_mask"][:, 1:]
    lp, ref = model(batch["ids"])[:, :-1].log_softmax(-1), batch["ref_logprobs"][:, :-1]
    margin = ((lp.gather(-1, target) - ref.gather(-1, target)).squeeze(-1) * mask).sum(1)
    seq_kl = ((ref.exp() * (ref - lp)).sum(-1) * mask).sum(1)
    m_w, m_l = margin.chunk(2)
    kl_w, kl_l = seq_kl.chunk(2)
    logits = (m_w - m_l) - alpha * (kl_l - kl_w.detach())
    return -nn.functional.logsigmoid(beta * logits).mean(), {"kl_chosen": kl_w.mean().item(), "kl_rejected": kl_l.mean().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    slow = 0.0
    for i in range(4):
        m, k = [], []
        for j in (i, i + 4):
            mm, kk = 0.0, 0.0
            for t in range(1, 10):
                if d["completion_mask"][j, t] == 1:
                    lp, ref = model(d["ids"][j:j + 1, :t])[0, -1].log_softmax(-1), d["ref_logprobs"][j, t - 1]
                    mm = mm + lp[d["ids"][j, t]] - ref[d["ids"][j, t]]
                    kk = kk + sum(ref[v].exp() * (ref[v] - lp[v]) for v in range(32))
            m.append(mm), k.append(kk)
        x = 0.1 * (m[0] - m[1] - 0.5 * (k[1] - k[0].item()))
        slow = slow + torch.log(1 + torch.exp(-x)) / 4
    g1, g2 = grads(loss, model), grads(slow, model)
    print("loss", loss.item(), "explicit", slow.item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
