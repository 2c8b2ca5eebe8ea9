"""ORPO: no reference model; the odds-ratio term uses MEAN log-probabilities of the answer, while the likelihood term trains the chosen row INCLUDING its prompt. Both the average and the prompt tokens in the NLL
are the authors' choice (Hong et al. 2024, kaistAI/orpo; TRL's ORPOTrainer: 'orpo chosen NLL loss is computed over the full prompt and response')."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"chosen_ids": "token ids, [pairs, chosen time], right padded with 0", "chosen_labels": "ids on the answer, -100 on prompt and padding, [pairs, chosen time]",
          "chosen_attention_mask": "1 on real tokens, [pairs, chosen time]",
          "rejected_ids": "token ids, [pairs, rejected time], another width than chosen", "rejected_labels": "ids on the answer, -100 elsewhere, [pairs, rejected time]"}
SETTINGS = {"lam": "weight of the odds-ratio term, 0.1"}
NOTES = ("Likelihood plus odds-ratio preference loss (ORPO), reference-free. Reduction: NLL is the mean over all real tokens (prompt and answer, without the first) of all chosen rows; odds-ratio term is the mean over pairs of per-token-mean "
         "log-probabilities of the answer only. No constants besides labels. All parameters are used. Chosen and rejected are separate tensors of different width; row i of both is one pair.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def _lay(g, pairs, time, prompts):
    ids, labels, att = torch.zeros(pairs, time, dtype=torch.long), torch.full((pairs, time), -100), torch.zeros(pairs, time, dtype=torch.long)
    for i, p in enumerate(prompts):
        n = int(torch.randint(2, time - len(p) + 1, (1,), generator=g))
        a = torch.randint(1, 32, (n,), generator=g)
        ids[i, :len(p) + n], labels[i, len(p):len(p) + n], att[i, :len(p) + n] = torch.cat([p, a]), a, 1
    return ids, labels, att


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    prompts = [torch.randint(1, 32, (int(torch.randint(2, 5, (1,), generator=g)),), generator=g) for _ in range(5)]
    c, cl, ca = _lay(g, 5, 12, prompts)
    r, rl, _ = _lay(g, 5, 9, prompts)
    return {"model": TinyLM(), "chosen_ids": c, "chosen_labels": cl, "chosen_attention_mask": ca, "rejected_ids": r, "rejected_labels": rl}


def _mean_logp(logits, labels):
    target = labels[:, 1:]
    keep = target != -100
    logp = logits[:, :-1].log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (logp * keep).sum(1) / keep.sum(1)


def right(model, batch, lam=0.1):
    logits = model(batch["chosen_ids"])
    everything = batch["chosen_ids"].masked_fill(batch["chosen_attention_mask"] == 0, -100)
    nll = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), everything[:, 1:].flatten(), ignore_index=-100)
    w, l = _mean_logp(logits, batch["chosen_labels"]), _mean_logp(model(batch["rejected_ids"]), batch["rejected_labels"])
    log_odds = (w - l) - (torch.log1p(-torch.exp(w)) - torch.log1p(-torch.exp(l)))
    return nll - lam * nn.functional.logsigmoid(log_odds).mean(), {"nll": nll.item(), "log_odds": log_odds.mean().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    nll, n, pref = 0.0, 0, 0.0
    for i in range(5):
        odds = []
        for side in ("chosen", "rejected"):
            ids, lab, lps = d[side + "_ids"], d[side + "_labels"], []
            for t in range(1, ids.shape[1]):
                if ids[i, t] == 0:
                    continue
                lp = model(ids[i:i + 1, :t])[0, -1].log_softmax(-1)[ids[i, t]]
                if side == "chosen":
                    nll, n = nll - lp, n + 1
                if lab[i, t] != -100:
                    lps.append(lp)
            p = torch.exp(sum(lps) / len(lps))
            odds.append(p / (1 - p))
        pref = pref + torch.log(1 + odds[1] / odds[0]) / 5
    slow = nll / n + 0.1 * pref
    g1, g2 = grads(loss, model), grads(slow, model)
    print("loss", loss.item(), "explicit", slow.item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-5 and close(g1, g2)
