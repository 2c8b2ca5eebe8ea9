"""Leave-one-out advantages with the deviation of the whole batch (RLOO plus REINFORCE++ scaling). The baseline leaves the row itself out, per group of any size; the divisor is the root mean square over ALL rows
and there is no second centring. A group of one has no baseline and gets zero, instead of its raw reward."""
FAMILY = "advantages"
KIND = "advantages"
INPUTS = {"rewards": "reward of each row, [rows]", "groups": "prompt number of each row, any order, groups of different size, [rows]"}
SETTINGS = {"eps": "added to the divisor, 1e-6"}
NOTES = ("Returns one advantage per row. Sums to zero within each group. The scale is shared by the batch, so advantages of one group do depend on the others. Adding a constant to the rewards of a group changes nothing. "
         "All-equal rewards give zeros. Single-member groups give 0 and do not count in the divisor.")
import torch


def make(seed):
    torch.manual_seed(seed)
    groups = torch.tensor([3, 0, 3, 7, 0, 3, 1, 7, 3])
    return {"rewards": torch.randint(0, 3, (9,)).float() + 0.1 * torch.randn(9), "groups": groups}


def right(rewards, groups, eps=1e-6):
    _, g = torch.unique(groups, return_inverse=True)
    k = int(g.max()) + 1
    size = torch.zeros(k, dtype=rewards.dtype).index_add(0, g, torch.ones_like(rewards))[g]
    total = torch.zeros(k, dtype=rewards.dtype).index_add(0, g, rewards)[g]
    others = (total - rewards) / (size - 1).clamp(min=1)
    alone = size < 2
    adv = torch.where(alone, torch.zeros_like(rewards), rewards - others)
    n = (~alone).sum().clamp(min=1)
    return adv / (adv.pow(2).sum() / n).sqrt().add(eps)


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    r, g = d["rewards"].tolist(), d["groups"].tolist()
    raw = []
    for i in range(9):
        o = [r[j] for j in range(9) if g[j] == g[i] and j != i]
        raw.append(r[i] - sum(o) / len(o) if o else None)
    used = [x for x in raw if x is not None]
    rms = (sum(x * x for x in used) / len(used)) ** 0.5
    want = torch.tensor([0.0 if x is None else x / (rms + 1e-6) for x in raw])
    print(out, want)
    assert torch.allclose(out, want, atol=1e-4) and out[6] == 0
    assert torch.equal(right(torch.ones(4), torch.tensor([0, 0, 1, 1])), torch.zeros(4))
