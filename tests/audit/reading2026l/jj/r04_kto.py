"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306; TRL KTOTrainer): no pairs. The reference point is a KL estimate from mismatched prompt/answer rows, shared by the batch, detached and cut at zero."""
import torch, torch.nn as nn
FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "prompt and answer, token ids, [rows, time]", "mask": "1 for answer tokens of ids", "desirable": "True for wanted answers, [rows]", "ref_logp": "summed reference log-probability of the answer, [rows]",
          "kl_ids": "the prompt of the row with the answer of another row, [rows, time]", "kl_mask": "1 for answer tokens of kl_ids", "kl_ref_logp": "summed reference log-probability of these answers, [rows]"}
SETTINGS = {"beta": "0.1", "w_d": "weight of desirable rows, 1.0", "w_u": "weight of undesirable rows, 1.33"}
NOTES = ("r = log pi(y|x) - log ref(y|x), sums over answer tokens (logits at t-1 for the token at t). z0 = max(0, mean over all rows of the same difference for the mismatched rows kl_ids): a constant of the batch, no gradient flows through it. "
         "A desirable row costs w_d * (1 - sigmoid(beta (r - z0))), an undesirable one w_u * (1 - sigmoid(beta (z0 - r))); the loss is the mean over all rows, both classes together. "
         "A batch may consist of one class only. Reference values are constants. kl_ids serve only the estimate of z0. All parameters are used.")

class LM(nn.Module):
    def __init__(self, vocab=27, width=20):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def _logp(model, ids, mask):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)

def make(seed):
    torch.manual_seed(seed)
    n, P, A = 6, 4, 6
    prompt, ans = torch.randint(1, 27, (n, P)), torch.randint(1, 27, (n, A))
    am = (torch.arange(A) < torch.randint(2, A + 1, (n, 1))).float()
    ids, kl = torch.cat([prompt, ans], 1), torch.cat([prompt, ans.roll(1, 0)], 1)
    mask, klm = torch.cat([torch.zeros(n, P), am], 1), torch.cat([torch.zeros(n, P), am.roll(1, 0)], 1)
    ref, model = LM(), LM()
    with torch.no_grad():
        model.load_state_dict({k: v + 0.1 * torch.randn_like(v) for k, v in ref.state_dict().items()})
        return {"ids": ids, "mask": mask, "desirable": torch.tensor([True, False, True, True, False, True]), "ref_logp": _logp(ref, ids, mask),
                "kl_ids": kl, "kl_mask": klm, "kl_ref_logp": _logp(ref, kl, klm) - 2.0, "model": model}

def right(model, batch, beta=0.1, w_d=1.0, w_u=1.33):
    with torch.no_grad():
        z0 = (_logp(model, batch["kl_ids"], batch["kl_mask"]) - batch["kl_ref_logp"]).mean().clamp(min=0)
    r = _logp(model, batch["ids"], batch["mask"]) - batch["ref_logp"]
    good = w_d * (1 - torch.sigmoid(beta * (r - z0)))
    bad = w_u * (1 - torch.sigmoid(beta * (z0 - r)))
    return torch.where(batch["desirable"], good, bad).mean()

if __name__ == "__main__":
    import math
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    with torch.no_grad():
        f = lambda ids, k: sum(m(ids[None])[0, t - 1].log_softmax(-1)[ids[t]].item() for t in range(1, 10) if k[t])
        z = max(0.0, sum(f(d["kl_ids"][i], d["kl_mask"][i]) - d["kl_ref_logp"][i].item() for i in range(6)) / 6); s = 0.0
        for i in range(6):
            r = f(d["ids"][i], d["mask"][i]) - d["ref_logp"][i].item()
            s += 1 - 1 / (1 + math.exp(-0.1 * (r - z))) if d["desirable"][i] else 1.33 * (1 - 1 / (1 + math.exp(-0.1 * (z - r))))
    g = sum(p.grad.norm() for p in m.parameters()).item()
    print(l.item(), s / 6, "z0", z, "grad", g); assert abs(l.item() - s / 6) < 1e-5 and g > 0
