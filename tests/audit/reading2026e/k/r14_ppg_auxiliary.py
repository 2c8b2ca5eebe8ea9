"""PPG auxiliary phase (Cobbe et al. 2021). The policy network is trained with NO policy gradient: its auxiliary value head regresses the
returns through the shared trunk while a KL to the frozen old policy (old first) holds the outputs; the real value network trains beside it."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "state_mask": "1 where the state after the token is a real state, [rows, time]",
          "old_logits": "logits of the policy before the auxiliary phase, [rows, time, vocab], constant", "returns": "value targets, [rows, time], constant"}
SETTINGS = {"beta_clone": "weight of the behaviour-cloning KL, 1.0"}
NOTES = ("Joint loss = 0.5 (aux value - return)^2 + beta_clone * KL(old || new) + 0.5 (value - return)^2; each a mean over real states. Right after "
         "copying the policy the KL and its gradient are zero. old_logits and returns are constants. All parameters are used.")


class PPGNet(nn.Module):
    def __init__(self, vocab=13, width=12):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.head, self.aux = nn.Linear(width, vocab), nn.Linear(width, 1)
        self.v_emb, self.v_rnn, self.v_head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, ids):
        h, hv = self.rnn(self.emb(ids))[0], self.v_rnn(self.v_emb(ids))[0]
        return self.head(h), self.aux(h).squeeze(-1), self.v_head(hv).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = PPGNet()
    lengths = torch.tensor([7, 9, 4, 6])
    mask = (torch.arange(9)[None] < lengths[:, None]).float()
    ids = torch.randint(1, 13, (4, 9), generator=g) * mask.long()
    with torch.no_grad():
        old = model(ids)[0] + 0.3 * torch.randn(4, 9, 13, generator=g)
    return {"model": model, "ids": ids, "state_mask": mask, "old_logits": old, "returns": torch.randn(4, 9, generator=g)}


def right(model, batch, beta_clone=1.0):
    logits, aux, value = model(batch["ids"])
    real = batch["state_mask"].bool()
    ret = batch["returns"][real]
    new, old = F.log_softmax(logits[real], -1), F.log_softmax(batch["old_logits"][real], -1)
    clone = F.kl_div(new, old, reduction="batchmean", log_target=True)      # KL(old || new), mean over states
    return 0.5 * F.mse_loss(aux[real], ret) + beta_clone * clone + 0.5 * F.mse_loss(value[real], ret)


def check(loss, slow, model, tol=2e-5):
    """same value and same gradient as the explicit version; every parameter is used"""
    params = list(model.parameters())
    a = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(slow, params, retain_graph=True, allow_unused=True)
    assert all(x is not None for x in a), "unused parameter"
    b = [torch.zeros_like(p) if x is None else x for x, p in zip(b, params)]
    norm = torch.sqrt(sum((x ** 2).sum() for x in a)).item()
    diff = max((x - y).abs().max().item() for x, y in zip(a, b))
    print(f"loss {loss.item():.6f}  slow {slow.item():.6f}  grad norm {norm:.5f}  max grad diff {diff:.1e}")
    assert abs(loss.item() - slow.item()) < tol * max(1, abs(slow.item())) and diff < tol * max(1, norm) and norm > 1e-4


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    L, A, V = m(b["ids"])
    tot, n = 0.0, 0
    for i in range(4):
        for t in range(9):
            if b["state_mask"][i, t]:
                p, q = torch.softmax(b["old_logits"][i, t], 0), torch.softmax(L[i, t], 0)
                r = b["returns"][i, t].item()
                tot, n = tot + 0.5 * (A[i, t] - r) ** 2 + 0.5 * (V[i, t] - r) ** 2 + sum(p[k] * torch.log(p[k] / q[k]) for k in range(13)), n + 1
    check(right(m, b), tot / n, m)
