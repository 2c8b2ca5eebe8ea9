"""Duplicates of the last round are cut off after the gather (gather_for_metrics of accelerate).
To give all ranks full batches the sampler fills the last round with rows from the start of the data set. Batches go round robin: round k has the batches of rank 0, rank 1, ... in
that order. The gathered last round is cut to the remainder, so that each row counts once; the results of some rank may be dropped as a whole."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a dict: rounds (list of tensors [batch], 1 where the answer is right), length (rows of the data set, the same on all ranks)"}
SETTINGS = {}
NOTES = ("Accuracy over the rows of the data set, each once. All ranks have the same number of rounds and the same batch size. The remainder is length modulo (ranks * batch); 0 means nothing to cut. "
         "`twin` is the accuracy over the first `length` results in the order of the data set.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    length, batch, world = 21, 4, 3
    correct = (torch.rand(length, generator=g) < 0.5).float()
    rounds = -(-length // (batch * world))
    order = [i % length for i in range(rounds * batch * world)]
    return {"ranks": [{"rounds": [correct[torch.tensor(order[(k * world + r) * batch:(k * world + r + 1) * batch])] for k in range(rounds)], "length": length} for r in range(world)]}


def right(ranks):
    length, world, rounds = ranks[0]["length"], len(ranks), len(ranks[0]["rounds"])
    batch = len(ranks[0]["rounds"][0])
    remainder = length % (batch * world)
    seen = []
    for k in range(rounds):
        gathered = torch.cat([r["rounds"][k] for r in ranks])               # all-gather
        if k == rounds - 1 and remainder > 0:
            gathered = gathered[:remainder]
        seen.append(gathered)
    return torch.cat(seen).mean().item()


def twin(ranks):
    flat = [v for k in range(len(ranks[0]["rounds"])) for r in ranks for v in r["rounds"][k].tolist()]
    return sum(flat[:ranks[0]["length"]]) / ranks[0]["length"]


if __name__ == "__main__":
    d = make(0)["ranks"]
    g = torch.Generator().manual_seed(0)
    truth = (torch.rand(21, generator=g) < 0.5).float().mean().item()
    print(right(d), twin(d), truth)
    assert abs(right(d) - truth) < 1e-6 and abs(twin(d) - truth) < 1e-6
