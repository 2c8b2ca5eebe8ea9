"""GAE that jumps over tool outputs. In verl and in VAGEN the next value of the last token of a model turn is the value of the first token of the next model turn: observation tokens neither discount nor cut the recursion, their own values are ignored."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward per token, 0 on observation tokens, flat [tokens]", "groups": "trajectory id of each token; the tokens of a trajectory are contiguous, [tokens]",
          "values": "critic value at each token, constant, [tokens]", "action_mask": "1 where the model wrote the token, 0 for tool outputs, [tokens]"}
SETTINGS = {"gamma": "discount per model token, 0.9", "lam": "GAE lambda, 0.8"}
NOTES = "Not whitened. The result is 0 on observation tokens. Values at observation tokens are never read. Trajectories end terminally (no bootstrap value after the last token)."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask, grp = [], []
    for t in range(3):
        m = [1] * int(torch.randint(2, 5, (1,), generator=g)) + [0] * 3 + [1] * 2 + [0] * (t + 1) + [1] * 3
        mask += m; grp += [t] * len(m)
    mask = torch.tensor(mask).float(); n = len(mask)
    return {"rewards": torch.randn(n, generator=g) * (torch.rand(n, generator=g) < .3) * mask, "groups": torch.tensor(grp),
            "values": torch.randn(n, generator=g), "action_mask": mask}

def right(rewards, groups, values, action_mask, gamma=0.9, lam=0.8):
    out = torch.zeros_like(rewards)
    next_value = carry = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if t + 1 < len(rewards) and groups[t] != groups[t + 1]:
            next_value = carry = 0.0
        m = action_mask[t]
        delta = rewards[t] + gamma * next_value - values[t]
        new = delta + gamma * lam * carry
        next_value = values[t] * m + (1 - m) * next_value
        carry = new * m + (1 - m) * carry
        out[t] = carry * m
    return out

if __name__ == "__main__":
    d = make(0); a = right(**d)
    for t in range(3):                                   # twin: cut the observations out, then plain GAE as an explicit double sum
        keep = [i for i in range(len(a)) if d["groups"][i] == t and d["action_mask"][i]]
        r, v = d["rewards"][keep].tolist(), d["values"][keep].tolist() + [0.0]
        for i in range(len(r)):
            w = sum((.72) ** (k - i) * (r[k] + .9 * v[k + 1] - v[k]) for k in range(i, len(r)))
            assert abs(w - a[keep[i]].item()) < 1e-5
    assert (a[d["action_mask"] == 0] == 0).all()
    other = dict(d, values=torch.where(d["action_mask"] == 0, torch.full_like(d["values"], 99.), d["values"]))
    assert torch.equal(a, right(**other)); print("ok", a.tolist()[:6])
