"""GAE over several turns that jumps over observation tokens (verl compute_gae_advantage_return, VAGEN, RAGEN). Tokens of the environment do not count as time steps: the next value and the running advantage are carried
across them unchanged, so neither gamma nor lambda decays there. The advantages are then whitened over the trained tokens only; masked places hold an unimportant number and are set to 0."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "token-level rewards, [rows, time], only on trained tokens", "values": "value estimate per token, [rows, time], garbage on masked tokens", "mask": "1 where the policy wrote the token, 0 on observation and padding, [rows, time]"}
SETTINGS = {"gamma": "discount, 0.9", "lam": "GAE lambda, 0.8"}
NOTES = "Whitened with mean and unbiased std over all trained tokens of all rows (+1e-8 on the variance). No groups. Values of masked tokens must not matter. Each row ends in a terminal state."


def make(seed):
    torch.manual_seed(seed)
    mask = torch.zeros(3, 12)
    for row, spans in enumerate([[(1, 4), (7, 10)], [(0, 5)], [(2, 4), (5, 6), (9, 12)]]):
        for a, b in spans:
            mask[row, a:b] = 1
    return {"rewards": torch.randn(3, 12) * mask, "values": torch.randn(3, 12), "mask": mask}


def right(rewards, values, mask, gamma=0.9, lam=0.8):
    next_value = torch.zeros(len(values))
    running = torch.zeros(len(values))
    columns = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        new = delta + gamma * lam * running
        running = mask[:, t] * new + (1 - mask[:, t]) * running
        next_value = mask[:, t] * values[:, t] + (1 - mask[:, t]) * next_value
        columns.append(running)
    adv = torch.stack(columns[::-1], dim=1)
    n = mask.sum()
    mean = (adv * mask).sum() / n
    var = ((adv - mean).square() * mask).sum() / (n - 1)
    return (adv - mean) * torch.rsqrt(var + 1e-8) * mask


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    raw = {}
    for i in range(3):
        places = [t for t in range(12) if d["mask"][i, t]]
        r, v = [float(d["rewards"][i, t]) for t in places], [float(d["values"][i, t]) for t in places] + [0.0]
        for k in range(len(places)):
            raw[i, places[k]] = sum((0.9 * 0.8) ** (j - k) * (r[j] + 0.9 * v[j + 1] - v[j]) for j in range(k, len(places)))
    x = torch.tensor(list(raw.values()))
    z = (x - x.mean()) / x.std()
    got = torch.stack([out[k] for k in raw])
    print("largest difference to the explicit sum", float((z - got).abs().max()))
    assert torch.allclose(z, got, atol=1e-5) and float((out * (1 - d["mask"])).abs().max()) == 0
