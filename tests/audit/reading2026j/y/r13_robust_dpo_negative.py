"""Robust DPO for noisy labels: a PLUS sign before a log-sigmoid and a division by 1 - 2 * eps. The loss can be negative and is unbounded below, because it is the unbiased estimate of the clean DPO loss when a share eps of the
labels is flipped (Chowdhury et al. 2024; TRL loss_type="robust"). Chosen and rejected rows alternate."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2 * pairs, time], row 2i is chosen, row 2i+1 the rejected one of the same pair, right padded with 0",
          "completion_mask": "1 on answer tokens, [2 * pairs, time]",
          "ref_logps": "log-probability of the answer under the frozen reference, summed over tokens, [2 * pairs], constant"}
SETTINGS = {"beta": "DPO strength, 0.1", "eps": "assumed share of flipped labels, 0.2; the loss is divided by 1 - 2 * eps, so eps < 0.5"}
NOTES = ("Preference loss (DPO with unbiased noise correction). Reduction: sum over tokens, mean over pairs. The loss may be negative. Needs an even number of rows, pairs adjacent (chosen, rejected). "
         "ref_logps is constant. eps = 0 is plain DPO. All parameters are used.")

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

def token_logps(logits, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 ... time-1."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_groups(g, 4, 2, 10, 32)
    ids, mask = ids.flatten(0, 1), mask.flatten(0, 1)
    model = TinyLM()
    with torch.no_grad():
        ref = (token_logps(model(ids), ids) * mask[:, 1:]).sum(1)
        ref = (ref + 4.0 * torch.randn(8, generator=g)).clamp(max=-0.05)
    return {"model": model, "ids": ids, "completion_mask": mask, "ref_logps": ref}


def right(model, batch, beta=0.1, eps=0.2):
    logp = (token_logps(model(batch["ids"]), batch["ids"]) * batch["completion_mask"][:, 1:]).sum(1)
    ratio = logp - batch["ref_logps"]
    h = beta * (ratio[0::2] - ratio[1::2])
    logsig = nn.functional.logsigmoid
    return ((-(1 - eps) * logsig(h) + eps * logsig(-h)) / (1 - 2 * eps)).mean()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    swap = lambda x: x.view(4, 2, *x.shape[1:]).flip(1).reshape(x.shape)
    flipped = {k: swap(v) for k, v in d.items()}
    clean, slow = 0.0, 0.0
    for i in range(4):
        r = [sum(model(d["ids"][j:j + 1, :t])[0, -1].log_softmax(-1)[d["ids"][j, t]] for t in range(1, 10) if d["completion_mask"][j, t] == 1) - d["ref_logps"][j] for j in (2 * i, 2 * i + 1)]
        p = 1 / (1 + torch.exp(-0.1 * (r[0] - r[1])))
        clean = clean - torch.log(p) / 4
        slow = slow + (-0.8 * torch.log(p) + 0.2 * torch.log(1 - p)) / 0.6 / 4
    mix = 0.8 * right(model, d) + 0.2 * right(model, flipped)         # expectation over flips
    g1, g2 = grads(mix, model), grads(clean, model)
    print("loss", loss.item(), "explicit", slow.item())
    print("expectation over flips", mix.item(), "clean DPO", clean.item(), "same gradient", close(g1, g2))
    print("gradient norm", sum((g ** 2).sum() for g in grads(loss, model)).sqrt().item())
    assert abs(loss.item() - slow.item()) < 1e-5 and abs(mix.item() - clean.item()) < 1e-5 and close(g1, g2) and close(grads(loss, model), grads(slow, model))
