"""Accuracy after dropping the sampler's repeats. DistributedSampler gives rank r the rows r, r+W, … and repeats the first rows until all ranks hold equally many; the gathered results are interleaved (transposed), not concatenated, and cut to the data set's size (accelerate gather_for_metrics)."""
import torch
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over W ranks of {'correct': 0/1 tensor [ceil(size / W)] in the sampler's order, 'size': rows of the data set, the same on all ranks}"}
SETTINGS = {}
NOTES = "Needs equal lengths on all ranks and the interleaved layout of an unshuffled torch DistributedSampler(drop_last=False); the last W*ceil(size/W)-size entries after interleaving are repeats and count for nothing. Any number of ranks, also more ranks than rows. Twin: single(correct) over the data set."
def make(seed, world=4):
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(5, 30, (1,), generator=g))
    correct = torch.randint(0, 2, (n,), generator=g)
    return {"ranks": [{"correct": correct[i], "size": n} for i in _shards(n, world)]}
def _shards(n, world):
    per = -(-n // world)
    order = torch.arange(per * world) % n
    return [order[r::world] for r in range(world)]
def right(ranks):
    merged = torch.stack([r["correct"] for r in ranks], dim=1).reshape(-1)
    return merged[: ranks[0]["size"]].double().mean().item()
def single(correct):
    return correct.double().mean().item()
if __name__ == "__main__":
    from torch.utils.data import DistributedSampler
    for n in (1, 3, 7, 10, 23):
        for world in (1, 2, 4, 5):
            mine = [i.tolist() for i in _shards(n, world)]
            assert mine == [list(DistributedSampler(range(n), world, r, shuffle=False)) for r in range(world)]
            c = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n))
            a = right([{"correct": c[i], "size": n} for i in map(torch.tensor, mine)])
            assert abs(a - single(c)) < 1e-12
    for seed in range(10):
        ranks = make(seed)["ranks"]; n = ranks[0]["size"]
        rows = [ranks[i % 4]["correct"][i // 4].item() for i in range(n)]
        assert abs(right(ranks) - sum(rows) / n) < 1e-12
    print("ok", n, right(ranks), "plain mean of all gathered", torch.cat([r["correct"] for r in ranks]).double().mean().item())
