"""REINFORCE++-baseline advantages (Hu et al. 2025, arXiv 2501.03262; OpenRLHF 'reinforce_baseline', verl 'reinforce_plus_plus_baseline'). Rewards are centred inside the prompt's group, but scaled with statistics of
the whole batch taken over tokens, so that long answers count more and the result is not centred inside a group any more."""
import torch

FAMILY = "advantages, returns and rewards"
KIND = "advantages"
INPUTS = {
    "rewards": "one reward per row, [rows]",
    "groups": "number of the prompt of each row, [rows]; at least two rows per prompt",
    "response_mask": "1 for the tokens of the answer, [rows, time]",
}
SETTINGS = {"eps": "added to the variance, 1e-8"}
NOTES = (
    "REINFORCE++ with group baseline. Step 1: centred reward of a row = reward minus the mean reward of its group (itself included), no division. Step 2: this number is put on every answer token of the row. Step 3: whitening over all answer tokens of the "
    "whole batch, across groups: minus the mean, divided by sqrt(variance + eps), mean and variance (dividing by the number of tokens, not n-1) taken over tokens with response_mask 1, so a row counts as often as it has tokens. "
    "Other entries are 0. Returns [rows, time]; constant."
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(8, 12)
    for r in range(8):
        mask[r, 2:int(torch.randint(4, 13, (1,), generator=g))] = 1
    return {"rewards": torch.rand(8, generator=g).round(decimals=1), "groups": torch.arange(8) // 4, "response_mask": mask}


def right(rewards, groups, response_mask, eps=1e-8):
    m = response_mask.to(rewards.dtype)
    k = int(groups.max()) + 1
    count = torch.zeros(k).index_add(0, groups, torch.ones_like(rewards))
    mean = torch.zeros(k).index_add(0, groups, rewards) / count
    adv = (rewards - mean[groups])[:, None] * m
    mu = adv.sum() / m.sum()
    var = ((adv - mu) ** 2 * m).sum() / m.sum()
    return (adv - mu) * (var + eps).rsqrt() * m


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        got = right(**d)
        flat, where = [], []
        for r in range(8):
            gr = [d["rewards"][j].item() for j in range(8) if d["groups"][j] == d["groups"][r]]
            for t in range(12):
                if d["response_mask"][r, t]:
                    flat.append(d["rewards"][r].item() - sum(gr) / len(gr))
                    where.append((r, t))
        mu = sum(flat) / len(flat)
        sd = (sum((x - mu) ** 2 for x in flat) / len(flat) + 1e-8) ** 0.5
        want = torch.zeros(8, 12)
        for (r, t), x in zip(where, flat):
            want[r, t] = (x - mu) / sd
        print("seed", seed, "advantage per row", [round(x, 3) for x in got[:, 2].tolist()], "difference %.1e" % (got - want).abs().max())
        assert torch.allclose(got, want, atol=1e-5)
