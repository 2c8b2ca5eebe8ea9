"""Accepted length as a product of marginals per micro-batch. vllm-project/speculators#1032, https://github.com/vllm-project/speculators/pull/1032, 2026.
The DFlash metric multiplied the accuracies of the positions inside each micro-batch and exported the result with a count of 1. That loses the
correlation inside a block and weighs micro-batches instead of blocks: runs of 3, 2, 1, 0 grouped as (3,1),(2,0) gave 1.25 instead of 1.5."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a list of micro-batches; each a boolean tensor [blocks, positions], true where the drafted token equals the verifier's"}
SETTINGS = {}
NOTES = ("Mean number of drafted tokens accepted per block (greedy: the leading run of correct positions), over all blocks of all micro-batches "
         "of all ranks. Without the bonus token. Micro-batches may have different numbers of blocks. `twin` is the single-process value.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    def blocks(n):
        skill = torch.rand(n, 1, generator=g)          # easy and hard blocks
        return torch.rand(n, 4, generator=g) < skill
    return {"ranks": [[blocks(3), blocks(6)], [blocks(5), blocks(2)]]}


def broken(ranks):
    total, count = 0.0, 0.0
    for micro_batches in ranks:
        for correct in micro_batches:
            marginal = correct.float().mean(0)
            total += torch.cumprod(marginal, 0).sum().item()
            count += 1.0
    return total / count


def right(ranks):
    total, count = 0.0, 0.0
    for micro_batches in ranks:
        for correct in micro_batches:
            total += torch.cumprod(correct.float(), 1).sum().item()
            count += correct.shape[0]
    return total / count


def twin(ranks):
    runs = []
    for row in torch.cat([c for r in ranks for c in r]).tolist():
        n = 0
        while n < len(row) and row[n]:
            n += 1
        runs.append(n)
    return sum(runs) / len(runs)


if __name__ == "__main__":
    issue = [[torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()], [torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()]]
    print("numbers of the issue:", broken(issue), right(issue))
    assert broken(issue) == 1.25 and right(issue) == 1.5
    d = make(0)["ranks"]
    print("make(0): broken", broken(d), "right", right(d), "twin", twin(d))
    assert abs(right(d) - twin(d)) < 1e-6 and abs(broken(d) - right(d)) > 1e-2
