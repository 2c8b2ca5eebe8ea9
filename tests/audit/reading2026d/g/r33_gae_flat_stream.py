"""GAE over a flat packed stream that SKIPS tool tokens. The next value of an action is that of the next ACTION of the same trajectory, however far; gamma and lambda are not applied over tool output. Right: tool tokens are environment, not steps."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "per token, [tokens]", "groups": "trajectory id of each token, [tokens], trajectories contiguous", "values": "critic, [tokens]", "action": "True where the model wrote the token, [tokens]"}
SETTINGS = {"gamma": "1.0 or less, 0.95", "lam": "0.9"}
NOTES = "Trajectories end terminally (next value 0). Tokens that are not actions get 0; rewards lie on actions only. Values constants."
import torch


def make(seed):
    torch.manual_seed(seed)
    act = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1]).bool()
    g = torch.tensor([0] * 7 + [1] * 6)
    return {"rewards": torch.randn(13) * act, "groups": g, "values": torch.randn(13), "action": act}


def right(rewards, groups, values, action, gamma=0.95, lam=0.9):
    out = torch.zeros_like(values)
    next_v = next_a = 0.0
    last = None
    for t in reversed(range(len(values))):
        if groups[t] != last:
            next_v = next_a = 0.0
            last = groups[t]
        if not action[t]:
            continue
        next_a = rewards[t] + gamma * next_v - values[t] + gamma * lam * next_a
        next_v = values[t]
        out[t] = next_a
    return out


if __name__ == "__main__":
    b = make(0); a = right(**b)
    for g in (0, 1):
        idx = [t for t in range(13) if b["groups"][t] == g and b["action"][t]]
        r = [b["rewards"][t].item() for t in idx]; v = [b["values"][t].item() for t in idx] + [0.0]
        d = [r[i] + .95 * v[i + 1] - v[i] for i in range(len(idx))]
        for i, t in enumerate(idx):
            assert abs(a[t].item() - sum((.95 * .9) ** (j - i) * d[j] for j in range(i, len(d)))) < 1e-5
    assert (a[~b["action"]] == 0).all()
    print(a)
