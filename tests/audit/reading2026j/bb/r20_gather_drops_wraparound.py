"""Evaluation accuracy where the sharded loader fills the last global batch with samples from the START of the dataset, and the gather cuts the last
gathered batch to the remainder (Hugging Face accelerate: even_batches and gather_for_metrics). Results of some ranks in the last step are thrown away
on purpose; a plain mean over all that ranks computed would count the first samples twice."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of dicts: correct [steps, batch] 0/1 per sample that the rank scored, length = number of samples in the dataset (the same on all ranks)"}
SETTINGS = {}
NOTES = ("Mean over the dataset's samples, each once. Deal: in step s rank r has the samples (s*W + r)*batch ... + batch of the padded order, so concatenating the ranks of a step "
         "restores the dataset's order; only the tail of the last step is padding. The order of the ranks matters (rank 0 first); each rank has the same number of steps, "
         "and steps = ceil(length / (W*batch)). Other deals of samples are illegal input. Single-process twin: twin().")

ACCURACY_BATCH = 3


def deal(correct, world, batch):
    n = len(correct)
    steps = -(-n // (world * batch))
    index = torch.arange(steps * world * batch) % n                # wraps around to the start, several times if need be
    padded = correct[index].view(steps, world, batch)
    return [{"correct": padded[:, r].clone(), "length": n} for r in range(world)]


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": deal((torch.rand(25 + seed % 5, generator=g) < 0.4).long(), 4, ACCURACY_BATCH)}


def right(ranks):
    n, steps = ranks[0]["length"], ranks[0]["correct"].shape[0]
    seen = total = 0
    for s in range(steps):
        gathered = torch.cat([r["correct"][s] for r in ranks])     # all-gather, rank order
        if s == steps - 1:
            gathered = gathered[:n - seen]                         # the remainder
        seen += len(gathered)
        total += int(gathered.sum())
    assert seen == n
    return total / n


def twin(ranks):
    """One process: sample number i was scored by rank (i // batch) % W in step i // (W*batch)."""
    world, batch, n = len(ranks), ranks[0]["correct"].shape[1], ranks[0]["length"]
    return sum(int(ranks[i // batch % world]["correct"][i // (world * batch), i % batch]) for i in range(n)) / n


if __name__ == "__main__":
    for seed in range(5):
        d = make(seed)["ranks"]
        naive = sum(r["correct"].float().mean().item() for r in d) / 4
        print("samples", d[0]["length"], "right", right(d), "twin", twin(d), "naive mean", round(naive, 4))
        assert right(d) == twin(d)
    x = (torch.arange(30) % 3 == 0).long()
    for n in (1, 5, 12, 24, 29, 30):
        for world in (1, 2, 4):
            assert abs(right(deal(x[:n], world, 3)) - x[:n].float().mean().item()) < 1e-6
