"""GAE that jumps over tool tokens: the value and the running advantage of the next model token are carried back unchanged across an observation.
verl compute_gae_advantage_return with a response mask of several turns. At a masked token neither gamma nor lambda is applied and its value is never read; the entries there hold a copy and are masked later.
The result on model tokens is plain GAE over the sequence with the observations cut out."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "per token, non-zero at model tokens only, [rows, time]", "groups": "row index (not used by GAE)", "values": "critic output at each token, [rows, time]", "mask": "1 at tokens that the model wrote, [rows, time]"}
SETTINGS = {"gamma": "0.97", "lam": "0.9"}
NOTES = "Per-token advantages, zero where the mask is 0; not whitened. Time runs over model tokens only: gamma and lambda are not applied across an observation. After the last model token the value is 0."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(4, 16)
    rewards = torch.zeros(4, 16)
    for r in range(4):
        end = int(torch.randint(11, 17, (1,), generator=g))
        mask[r, 1:end] = 1
        mask[r, 4:7] = 0
        rewards[r, end - 1] = torch.randn(1, generator=g)
        rewards[r, 3] = 0.2
    return {"rewards": rewards, "groups": torch.arange(4), "values": torch.randn(4, 16, generator=g), "mask": mask}


def right(rewards, groups, values, mask, gamma=0.97, lam=0.9):
    next_value, last = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    out = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        new = delta + gamma * lam * last
        m = mask[:, t]
        next_value = values[:, t] * m + next_value * (1 - m)
        last = new * m + last * (1 - m)
        out.append(last)
    return torch.stack(out[::-1], 1) * mask


if __name__ == "__main__":
    d = make(0); a = right(**d)
    for r in range(4):
        keep = d["mask"][r].bool()
        rew, val = d["rewards"][r][keep], d["values"][r][keep]
        n, adv, want = len(rew), 0.0, []
        for t in reversed(range(n)):
            adv = rew[t] + 0.97 * (val[t + 1] if t + 1 < n else 0.0) - val[t] + 0.97 * 0.9 * adv
            want.append(adv)
        assert torch.allclose(torch.stack(want[::-1]), a[r][keep], atol=1e-5)
    print("advantages of row 0", a[0].tolist())
