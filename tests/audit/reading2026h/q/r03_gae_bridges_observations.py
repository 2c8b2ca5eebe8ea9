"""GAE that jumps over observation tokens. verl's compute_gae_advantage_return with response_mask: at a masked position the running next value and the running advantage are carried over unchanged.
The recursion thus treats the trained tokens as consecutive steps, and neither gamma nor lambda is spent on tool results. The advantage at a masked position is a copy, later masked out. At the end the advantages are whitened over trained tokens."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "token rewards, mostly zero, on trained tokens only, [rows, time]", "values": "value estimates per token, arbitrary on masked tokens, [rows, time]", "mask": "1 on tokens the policy wrote, 0 on observations and padding, [rows, time]"}
SETTINGS = {"gamma": "discount per trained token, 0.95", "lam": "GAE lambda, 0.9"}
NOTES = "Returns whitened advantages [rows, time], zero where mask is 0. Equal to GAE on the row with the masked tokens cut out, then whitening (mean 0, unbiased variance 1) over the trained tokens of all rows. Values on masked positions have no influence. All inputs are constants."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 1, 1, 1, 0, 0.0]])
    rewards = torch.zeros(2, 10)
    rewards[0, 9], rewards[0, 2], rewards[1, 7] = 1.0, 0.2, -0.5
    return {"rewards": rewards, "values": torch.randn(2, 10, generator=g), "mask": mask}


def right(rewards, values, mask, gamma=0.95, lam=0.9):
    n, t = rewards.shape
    nextv, last, out = torch.zeros(n), torch.zeros(n), []
    for i in reversed(range(t)):
        delta = rewards[:, i] + gamma * nextv - values[:, i]
        here = delta + gamma * lam * last
        nextv = values[:, i] * mask[:, i] + (1 - mask[:, i]) * nextv
        last = here * mask[:, i] + (1 - mask[:, i]) * last
        out.append(last)
    adv = torch.stack(out[::-1], 1)
    k = mask.sum()
    mean = (adv * mask).sum() / k
    var = (((adv - mean) ** 2) * mask).sum() / (k - 1)
    return (adv - mean) * (var + 1e-8).rsqrt() * mask


if __name__ == "__main__":
    d = make(0)
    got, flat = right(**d), []
    for i in range(2):
        idx = [t for t in range(10) if d["mask"][i, t]]
        A, nv, res = 0.0, 0.0, []
        for t in reversed(idx):
            A = d["rewards"][i, t].item() + 0.95 * nv - d["values"][i, t].item() + 0.95 * 0.9 * A
            nv = d["values"][i, t].item()
            res.append(A)
        flat += res[::-1]
    f = torch.tensor(flat)
    f = (f - f.mean()) / f.std()
    print("largest difference", (got[d["mask"] > 0] - f).abs().max().item())
    assert torch.allclose(got[d["mask"] > 0], f, atol=1e-4)
