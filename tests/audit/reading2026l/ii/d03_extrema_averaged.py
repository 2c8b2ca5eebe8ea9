"""Minimum, maximum and total averaged over groups. NVIDIA-NeMo/RL#2175, https://github.com/NVIDIA-NeMo/RL/pull/2175, 2026.
When rollout metrics of several trajectory groups were merged, every numeric entry was averaged, whatever it meant. The reported
max was the mean of the maxima, the min the mean of the minima, and the total number of turns was divided by the number of groups."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one tensor per rank: number of turns of each trajectory that the rank generated, the same number of trajectories on every rank",
          "name": "which entry to report: turns_per_sample/mean, turns_per_sample/max, turns_per_sample/min or total_turns"}
SETTINGS = {}
NOTES = ("Each rank first makes its own dict of the four entries and then the dicts are merged. The merged number describes all trajectories of "
         "all ranks: /max and /min are the extrema over all trajectories, total_turns is the sum over all, /mean is the mean over all trajectories "
         "(the ranks have equally many). The single-process twin computes the same entry on the concatenated tensor. Any number of ranks.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [torch.randint(1, 12, (6,), generator=g).float() for _ in range(4)], "name": "turns_per_sample/max"}


def _local(t):
    return {"turns_per_sample/mean": t.mean().item(), "turns_per_sample/max": t.max().item(),
            "turns_per_sample/min": t.min().item(), "total_turns": t.sum().item()}


def broken(per_rank, name):
    v = [_local(t)[name] for t in per_rank]
    return sum(v) / len(v)


def right(per_rank, name):
    v = [_local(t)[name] for t in per_rank]
    if name.endswith("/max"):
        return max(v)
    if name.endswith("/min"):
        return min(v)
    if name == "total_turns":
        return sum(v)
    return sum(v) / len(v)


def twin(per_rank, name):
    return _local(torch.cat(per_rank))[name]


if __name__ == "__main__":
    for n in ("turns_per_sample/mean", "turns_per_sample/max", "turns_per_sample/min", "total_turns"):
        i = dict(make(0), name=n)
        print(n, "broken", broken(**i), "right", right(**i), "twin", twin(**i))
