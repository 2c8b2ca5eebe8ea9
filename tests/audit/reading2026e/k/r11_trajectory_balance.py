"""GFlowNet trajectory balance for a language model (Malkin et al. 2022; Hu et al. 2023). A learned scalar log Z, a plain square, no
advantage and no ratio to a sampler: the data may come from any policy, so there is no importance weight and none is missing."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], all rows start with the same prompt, right-padded with 0", "loss_mask": "1 where the token is a sampled completion token (the end token included), [rows, time]",
          "ref_logps": "log-probability of the whole completion under the reference, [rows], constant", "rewards": "reward of each row, [rows], constant"}
SETTINGS = {"beta": "temperature of the posterior ref(y) exp(r / beta), 0.5; divides the reward"}
NOTES = ("Trajectory balance: mean over rows of (log Z + log pi(y) - log ref(y) - r / beta)^2, where log pi(y) is the sum over the completion. "
         "log Z is a parameter of the model and gets its gradient from this loss. One prompt per batch. All parameters are used.")


class TinyLM(nn.Module):
    """embedding -> GRU (causal by nature) -> vocabulary"""
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])          # [rows, time, vocab]


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    logp = F.log_softmax(model(ids[:, :-1]).float(), -1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make_ids(g, rows, time, vocab=23, prompt=3):
    """prompts of 3 tokens, completions of random length, 0 = padding on the right"""
    lengths = torch.randint(prompt + 2, time + 1, (rows,), generator=g)
    pos = torch.arange(time)[None]
    ids = torch.randint(1, vocab, (rows, time), generator=g) * (pos < lengths[:, None])
    mask = ((pos >= prompt) & (pos < lengths[:, None])).float()
    return ids, mask


class WithLogZ(TinyLM):
    def __init__(self):
        super().__init__()
        self.log_z = nn.Parameter(torch.zeros(()))


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = WithLogZ()
    ids, mask = make_ids(g, 6, 10)
    ids[:, :3] = ids[:1, :3]
    ref = (token_logps(model, ids).detach() * mask[:, 1:]).sum(1) + 0.5 * torch.randn(6, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref, "rewards": torch.rand(6, generator=g)}


def right(model, batch, beta=0.5):
    seq = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    return (model.log_z + seq - batch["ref_logps"] - batch["rewards"] / beta).square().mean()


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
    lp, tot = token_logps(m, b["ids"]), 0.0
    for i in range(6):
        s = sum(lp[i, t] for t in range(lp.shape[1]) if b["loss_mask"][i, t + 1])
        tot = tot + (m.log_z + s - b["ref_logps"][i].item() - 2 * b["rewards"][i].item()) ** 2 / 6
    check(right(m, b), tot, m)
