"""Listwise DPO under the Plackett-Luce model: every answer is scored against itself AND all worse ones by a reversed cumulative logsumexp, so the worst answer's own term is exactly 0, and an answer's gradient changes sign
along the list. Missing answers are filled with -1e9 so that they drop out. Rafailov et al. 2023, appendix A.3; PRO, S-DPO do similar."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [prompts, 4 answers, time], answers sorted from best to worst, right padded with 0",
          "completion_mask": "1 on answer tokens, [prompts, 4, time]; all 0 for a missing answer",
          "answer_mask": "1 where the answer exists, [prompts, 4]; missing ones are at the end, at least 2 exist",
          "ref_logps": "log-probability of the answer under the reference (sum), [prompts, 4], constant, 0 if missing"}
SETTINGS = {"beta": "DPO strength, 0.1"}
NOTES = ("Listwise preference loss (Plackett-Luce DPO). Reduction: token sum for scores, SUM over ranks, mean over prompts (prompts with more answers weigh more, as in the likelihood). "
         "The order of the answers along dimension 1 is the label. ref_logps is constant. All parameters are used. Any number of prompts.")

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
    prompts, K, time = 4, 4, 10
    ids, mask, have = torch.zeros(prompts, K, time, dtype=torch.long), torch.zeros(prompts, K, time), torch.zeros(prompts, K)
    for i in range(prompts):
        p = int(torch.randint(2, 4, (1,), generator=g))
        prompt = torch.randint(1, 32, (p,), generator=g)
        for k in range(int(torch.randint(2, K + 1, (1,), generator=g)) if i else K):
            n = int(torch.randint(2, time - p + 1, (1,), generator=g))
            ids[i, k, :p + n] = torch.cat([prompt, torch.randint(1, 32, (n,), generator=g)])
            mask[i, k, p:p + n], have[i, k] = 1.0, 1.0
    model = TinyLM()
    with torch.no_grad():
        flat = ids.flatten(0, 1)
        ref = (token_logps(model(flat), flat).view(prompts, K, -1) * mask[..., 1:]).sum(-1)
        ref = (ref + 2.0 * torch.randn(prompts, K, generator=g)).clamp(max=-0.05) * have
    return {"model": model, "ids": ids, "completion_mask": mask, "answer_mask": have, "ref_logps": ref}


def right(model, batch, beta=0.1):
    flat, have = batch["ids"].flatten(0, 1), batch["answer_mask"]
    logp = (token_logps(model(flat), flat).view(*have.shape, -1) * batch["completion_mask"][..., 1:]).sum(-1)
    score = (beta * (logp - batch["ref_logps"])).masked_fill(have == 0, -1e9)
    rest = score.flip(1).logcumsumexp(1).flip(1)                          # logsumexp over this answer and all worse ones
    return ((rest - score) * have).sum(1).mean()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, slow = right(model, d), 0.0
    for i in range(4):
        s = []
        for k in range(int(d["answer_mask"][i].sum())):
            s.append(0.1 * (sum(model(d["ids"][i, k, :t][None])[0, -1].log_softmax(-1)[d["ids"][i, k, t]] for t in range(1, 10) if d["completion_mask"][i, k, t] == 1) - d["ref_logps"][i, k]))
        for k in range(len(s) - 1):
            slow = slow - torch.log(torch.exp(s[k]) / sum(torch.exp(x) for x in s[k:])) / 4
    g1, g2 = grads(loss, model), grads(slow, model)
    print("answers", d["answer_mask"].sum(1).tolist(), "loss", loss.item(), "explicit", slow.item())
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
