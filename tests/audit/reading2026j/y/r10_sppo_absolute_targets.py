"""SPPO: preference loss without any pairwise comparison in the loss. Each answer's log-ratio is regressed onto its own absolute target (win probability - 1/2) / beta, so the rejected answer is pushed down only to a
finite level, and is pushed UP again below it. The beta is small and divides. Wu et al. 2024 (SPPO) and its public code; TRL's 'sppo_hard' is the case of probabilities 1 and 0."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [2 * pairs, time]: first all chosen rows, then all rejected rows in the same order, right padded with 0",
          "completion_mask": "1 on answer tokens, [2 * pairs, time], aligned with ids",
          "ref_logps": "log-probability of the answer under the frozen reference, summed over its tokens, [2 * pairs], constant",
          "win_prob": "estimated probability that this answer beats a random answer of the policy, [2 * pairs], constant; the two of a pair need not add to 1"}
SETTINGS = {"beta": "inverse of the regression scale eta, 0.05; divides the target"}
NOTES = ("Preference optimisation as a squared regression (SPPO). Reduction: sum over tokens for the log-probability, half the sum of both squares per pair, mean over pairs. Needs an even number of rows, "
         "chosen half first; though no term couples the two. ref_logps and win_prob are constants. beta must not be 0. All parameters are used.")

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
    ids, mask = ids.transpose(0, 1).flatten(0, 1), mask.transpose(0, 1).flatten(0, 1)     # chosen half, rejected half
    model = TinyLM()
    with torch.no_grad():
        ref = (token_logps(model(ids), ids) * mask[:, 1:]).sum(1)
        ref = (ref + 2.0 * torch.randn(8, generator=g)).clamp(max=-0.05)
    win = torch.cat([0.5 + 0.5 * torch.rand(4, generator=g), 0.5 * torch.rand(4, generator=g)])
    return {"model": model, "ids": ids, "completion_mask": mask, "ref_logps": ref, "win_prob": win}


def right(model, batch, beta=0.05):
    logp = (token_logps(model(batch["ids"]), batch["ids"]) * batch["completion_mask"][:, 1:]).sum(1)
    chosen, rejected = (logp - batch["ref_logps"]).chunk(2)
    p_chosen, p_rejected = batch["win_prob"].chunk(2)
    loss_w = (chosen - (p_chosen - 0.5) / beta) ** 2
    loss_l = (rejected - (p_rejected - 0.5) / beta) ** 2
    return ((loss_w + loss_l) / 2).mean(), {"chosen_ratio": chosen.mean().item(), "rejected_ratio": rejected.mean().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    total = 0.0
    for i in range(8):
        lp = sum(model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)[d["ids"][i, t]] for t in range(1, 10) if d["completion_mask"][i, t] == 1)
        total = total + (lp - d["ref_logps"][i] - (d["win_prob"][i] - 0.5) * 20) ** 2 / 8
    g1, g2 = grads(loss, model), grads(total, model)
    print("loss", loss.item(), "explicit", total.item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2, 1e-4))
    assert abs(loss.item() - total.item()) < 1e-4 * total.item() and close(g1, g2, 1e-4)
