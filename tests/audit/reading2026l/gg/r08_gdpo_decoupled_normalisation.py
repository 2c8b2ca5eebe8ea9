"""GDPO (NVIDIA, arXiv:2601.05242; supported in TRL, verl and NeMo-RL): with several rewards each one is normalised inside its group before they are summed, and the sum is then whitened
over the batch. A reward that is always equal in a group adds 0 there, and two different reward vectors with the same sum get different advantages."""
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {"rewards": "one column per reward function, [rows, rewards]", "groups": "prompt number of each row, [rows]", "weights": "weight of each reward function, [rewards]"}
SETTINGS = {"eps": "added to each standard deviation, 1e-4"}
NOTES = ("GDPO. (1) For each reward function on its own: (reward - mean of the prompt's rows) / (standard deviation of the prompt's rows + eps). (2) Weighted sum over the reward functions. "
         "(3) Over all rows of the batch: subtract the mean, divide by (standard deviation + eps). Both standard deviations are those of a sample (divided by n-1). "
         "The normalisation comes before the sum; the weights act on normalised rewards. One advantage per row, [rows], constant. Each prompt has at least 2 rows.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.stack([(torch.rand(12, generator=g) < 0.5).float(), 10 * torch.rand(12, generator=g), torch.randint(0, 3, (12,), generator=g).float()], 1)
    r[:4, 2] = 1.0                                  # no difference in the third reward in the first group
    return {"rewards": r, "groups": torch.arange(3).repeat_interleave(4), "weights": torch.tensor([1.0, 0.5, 0.25])}


def right(rewards, groups, weights, eps=1e-4):
    z = torch.zeros_like(rewards)
    for g in groups.unique():
        i = groups == g
        r = rewards[i]
        z[i] = (r - r.mean(0)) / (r.std(0) + eps)
    s = (z * weights).sum(1)
    return (s - s.mean()) / (s.std() + eps)


if __name__ == "__main__":
    m = make(0); a = right(**m); tot = []
    for i in range(12):
        s = 0.0
        for k in range(3):
            x = [float(m["rewards"][j, k]) for j in range(12) if m["groups"][j] == m["groups"][i]]
            mu = sum(x) / 4; sd = (sum((y - mu) ** 2 for y in x) / 3) ** 0.5
            s += float(m["weights"][k]) * (float(m["rewards"][i, k]) - mu) / (sd + 1e-4)
        tot.append(s)
    mu = sum(tot) / 12; sd = (sum((y - mu) ** 2 for y in tot) / 11) ** 0.5
    slow = torch.tensor([(y - mu) / (sd + 1e-4) for y in tot])
    print(a, (a - slow).abs().max().item())
    assert torch.allclose(a, slow, atol=1e-4)
