"""KTO: single answers with a thumb, and a KL baseline from answers of other prompts.
Ethayarajh et al. 2024 (arXiv 2402.01306); TRL KTOTrainer. The reference point is the mean log-ratio of deliberately mismatched pairs (prompt i, answer i+1), computed without gradient, cut at 0 and shared by the whole batch. Good and bad rows are
weighted differently and need not come in pairs; a batch may hold one kind only."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and answer, [rows, time]", "kl_ids": "same prompts with the answers of other rows, [rows, time]", "answer_mask": "1 on answer tokens, [rows, time]", "label": "1 desirable, 0 undesirable, [rows]",
          "ref_logps": "sum of reference log-probs over the answer of ids, [rows], a constant", "ref_kl_logps": "same for kl_ids"}
SETTINGS = {"beta": "0.1", "desirable": "weight 1.0", "undesirable": "weight 1.33"}
NOTES = ("Preference loss, mean over rows; log-probs are summed over the answer, not averaged. The KL term is a constant (no gradient by design); the mismatched rows are not trained. All answers lie at the same places, so one mask serves both. All parameters used.")

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, ref = TinyLM(), TinyLM()
    ids = torch.randint(0, 29, (6, 12), generator=g)
    kl_ids = torch.cat([ids[:, :5], ids[:, 5:].roll(1, 0)], 1)
    mask = torch.zeros(6, 12); mask[:, 5:] = 1
    with torch.no_grad():
        ref.load_state_dict({k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in model.state_dict().items()})
        r, rk = ((token_logps(ref, x) * mask[:, 1:]).sum(1) for x in (ids, kl_ids))
    return {"model": model, "ids": ids, "kl_ids": kl_ids, "answer_mask": mask, "label": torch.tensor([1, 0, 1, 1, 0, 1]), "ref_logps": r, "ref_kl_logps": rk}


def right(model, batch, beta=0.1, desirable=1.0, undesirable=1.33):
    mask = batch["answer_mask"][:, 1:]
    with torch.no_grad():
        kl = ((token_logps(model, batch["kl_ids"]) * mask).sum(1) - batch["ref_kl_logps"]).mean().clamp(min=0)
    ratio = (token_logps(model, batch["ids"]) * mask).sum(1) - batch["ref_logps"]
    good = batch["label"].bool()
    losses = torch.where(good, desirable * (1 - torch.sigmoid(beta * (ratio - kl))), undesirable * (1 - torch.sigmoid(beta * (kl - ratio))))
    return losses.mean(), {"kl": kl.item()}


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss, metrics = right(m, d); loss.backward(); got = m.head.weight.grad.clone(); m.zero_grad()
    score = lambda x, r: sum(m(x[r:r + 1]).log_softmax(-1)[0, t - 1, x[r, t]] for t in range(5, 12))
    kl = max(0.0, sum(float(score(d["kl_ids"], r).detach() - d["ref_kl_logps"][r]) for r in range(6)) / 6)
    slow = 0.0
    for r in range(6):
        x = 0.1 * (score(d["ids"], r) - d["ref_logps"][r] - kl)
        slow = slow + (1.0 * (1 - torch.sigmoid(x)) if d["label"][r] else 1.33 * (1 - torch.sigmoid(-x))) / 6
    slow.backward()
    print("loss", loss.item(), "loop", slow.item(), metrics, "gradient", got.norm().item())
    assert torch.allclose(loss, slow, atol=1e-5) and torch.allclose(got, m.head.weight.grad, atol=1e-5) and got.norm() > 0
