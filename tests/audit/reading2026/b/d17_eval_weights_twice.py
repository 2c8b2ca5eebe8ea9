"""Tagged evaluation multiplies by the loss weights twice. Open-Athena/marin-dna#499 (levanter's eval.py in marin),
https://github.com/Open-Athena/marin-dna/issues/499, 2026.
The per-position loss comes back with the weights already applied; the accumulator multiplies by them again but divides by their plain sum. With weights 0 and 1 nothing
shows; with 0.01 on repeats the reported validation loss is biased downward while training is right."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict for each rank: nll [rows, time], loss_weight [rows, time] (1.0 or 0.01)"}
SETTINGS = {}
NOTES = "Validation loss: mean of the token loss weighted by loss_weight over all positions of all ranks, sum(w * nll) / sum(w)."


def _per_position_loss(r):
    return r["nll"] * r["loss_weight"]


def broken(ranks):
    total = norm = 0.0
    for r in ranks:
        losses = _per_position_loss(r)
        total += float((losses * r["loss_weight"]).sum())
        norm += float(r["loss_weight"].sum())
    return total / norm


def right(ranks):
    total = norm = 0.0
    for r in ranks:
        losses = _per_position_loss(r)
        total += float(losses.sum())
        norm += float(r["loss_weight"].sum())
    return total / norm


def twin(ranks):
    """One process."""
    nll, w = torch.cat([r["nll"].flatten() for r in ranks]), torch.cat([r["loss_weight"].flatten() for r in ranks])
    return float((nll * w).sum() / w.sum())


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for k in range(3):
        nll = torch.rand(2 + k, 10, generator=g) * 3
        w = torch.where(torch.rand(2 + k, 10, generator=g) < 0.5, torch.tensor(0.01), torch.tensor(1.0))
        ranks.append({"nll": nll, "loss_weight": w})
    return {"ranks": ranks}


if __name__ == "__main__":
    x = make(0)
    print("broken", broken(**x), "right", right(**x), "twin", twin(**x))
    assert abs(right(**x) - twin(**x)) < 1e-5 and abs(broken(**x) - twin(**x)) > 1e-4
