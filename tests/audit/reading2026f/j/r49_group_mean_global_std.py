"""REINFORCE++ with baseline: the mean is taken within the prompt's group but the deviation over the WHOLE batch, after the subtraction, so easy and hard groups keep their relative size. Two normalisations over different sets are right (Hu et al. 2025; OpenRLHF, verl 'reinforce_plus_plus_baseline')."""
import torch

FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "one per completion, [rows]", "groups": "number of the prompt, [rows], any order and sizes"}
SETTINGS = {"eps": "1e-8, added to the variance"}
NOTES = "Global standard deviation with divisor rows. Groups may differ in size; a group of one gets zero. No gradient. If all groups are constant the result is zero."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 3, 3])[torch.randperm(10, generator=g)]
    return {"rewards": torch.randn(10, generator=g) * (1 + groups.float()), "groups": groups}


def right(rewards, groups, eps=1e-8):
    _, inv = groups.unique(return_inverse=True)
    n = torch.bincount(inv)
    mean = torch.zeros(len(n)).index_add_(0, inv, rewards) / n
    centred = rewards - mean[inv]
    centred = centred - centred.mean()
    return centred * (centred.square().mean() + eps).rsqrt()


if __name__ == "__main__":
    for s in range(10):
        d = make(s)
        c = []
        for i in range(10):
            mates = [float(d["rewards"][j]) for j in range(10) if d["groups"][j] == d["groups"][i]]
            c.append(float(d["rewards"][i]) - sum(mates) / len(mates))
        sd = (sum(x * x for x in c) / 10) ** 0.5
        a = right(**d)
        assert torch.allclose(a, torch.tensor(c) / sd, atol=1e-5)
    print("ok", a.tolist())
