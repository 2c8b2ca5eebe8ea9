"""V-trace actor-critic (IMPALA, Espeholt et al. 2018). Two different clipped ratios (rho for the target, c for the trace), all
targets detached, the advantage uses the NEXT V-trace target instead of the next value, and the actor has no PPO clip."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; token t+1 is the action taken in the state after token t", "behaviour_logps": "log-probabilities of ids[:, 1:] under the behaviour policy, [rows, time-1], constant",
          "rewards": "reward of each action, [rows, time-1], constant", "discounts": "gamma, or 0 where the episode ends with the action, [rows, time-1], constant"}
SETTINGS = {"rho_bar": "clip of the importance weight in the target, 1.0", "c_bar": "clip of the trace weight, 0.9", "value_coef": "0.5", "entropy_coef": "0.01"}
NOTES = ("IMPALA loss, mean over all actions (every position is an action, nothing is masked; episodes end by discount 0). Bootstraps from "
         "the value after the last action; ratios and targets are constants. All parameters (policy and value head) are used.")


class ActorCritic(nn.Module):
    def __init__(self, vocab=11, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
        self.value = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        return self.head(h), self.value(h).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = ActorCritic()
    ids = torch.randint(0, 11, (4, 9), generator=g)
    with torch.no_grad():
        lp = F.log_softmax(model(ids)[0][:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    disc = torch.full((4, 8), 0.95); disc[1, 4] = 0.0; disc[3, 7] = 0.0
    return {"model": model, "ids": ids, "behaviour_logps": lp + 0.4 * torch.randn(lp.shape, generator=g),
            "rewards": torch.randn(4, 8, generator=g), "discounts": disc}


def right(model, batch, rho_bar=1.0, c_bar=0.9, value_coef=0.5, entropy_coef=0.01):
    ids, disc, rew = batch["ids"], batch["discounts"], batch["rewards"]
    logits, values = model(ids)
    logps = F.log_softmax(logits[:, :-1], -1)
    logp = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    v = values[:, :-1]
    with torch.no_grad():
        w = torch.exp(logp - batch["behaviour_logps"])
        rho, c = w.clamp(max=rho_bar), w.clamp(max=c_bar)
        delta = rho * (rew + disc * values[:, 1:] - v)
        acc, out = torch.zeros(len(ids)), []
        for t in reversed(range(rew.shape[1])):
            acc = delta[:, t] + disc[:, t] * c[:, t] * acc
            out.append(acc + v[:, t])
        vs = torch.stack(out[::-1], 1)
        vs_next = torch.cat([vs[:, 1:], values[:, -1:]], 1)
        adv = rho * (rew + disc * vs_next - v)
    entropy = -(logps.exp() * logps).sum(-1)
    return (-(logp * adv) + value_coef * 0.5 * (vs - v) ** 2 - entropy_coef * entropy).mean()


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
    logits, val = m(b["ids"])
    P = F.log_softmax(logits, -1)
    tot = 0.0
    for i in range(4):
        T, vd = 8, val[i].tolist()
        lp = [P[i, t, b["ids"][i, t + 1]] for t in range(T)]
        w = [torch.exp(lp[t] - b["behaviour_logps"][i, t]).item() for t in range(T)]
        r, d = b["rewards"][i].tolist(), b["discounts"][i].tolist()
        def target(s):                      # the sum form of the paper
            if s == T:
                return vd[T]
            x = vd[s]
            for t in range(s, T):
                k = 1.0
                for j in range(s, t):
                    k *= d[j] * min(0.9, w[j])
                x += k * min(1.0, w[t]) * (r[t] + d[t] * vd[t + 1] - vd[t])
            return x
        for t in range(T):
            adv = min(1.0, w[t]) * (r[t] + d[t] * target(t + 1) - vd[t])
            ent = -(P[i, t].exp() * P[i, t]).sum()
            tot = tot + (-lp[t] * adv + 0.25 * (target(t) - val[i, t]) ** 2 - 0.01 * ent) / 32
    check(right(m, b), tot, m)
