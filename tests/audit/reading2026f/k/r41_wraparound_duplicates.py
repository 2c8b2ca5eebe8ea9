"""Accuracy over ranks with a wrap-around sampler (DistributedSampler; accelerate gather_for_metrics). The sampler pads the data set by repeating its first samples so that
all ranks have the same number; the gathered results are interleaved back and the surplus at the END is cut, which takes away exactly the repeats."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of {correct: 0/1 list, rank r holds samples r, r + world, ...; total: true size of the data set}", "all": "for the twin only: results of the whole data set in order, without repeats"}
SETTINGS = {}
NOTES = "All ranks hold equally many results (the sampler pads). total is the same on all ranks. The order rank-major would cut the wrong ones, so results are interleaved first. Twin: single(correct)."


def make(seed):
    import random
    r = random.Random(seed); total, world = 10 + seed % 7, 4
    correct = [int(r.random() < 0.6) for _ in range(total)]
    order = list(range(total)); order += order[: -total % world]
    return {"ranks": [{"correct": [correct[i] for i in order[k::world]], "total": total} for k in range(world)], "all": correct}


def single(correct):
    return sum(correct) / len(correct)


def right(ranks):
    total = ranks[0]["total"]
    interleaved = [x for step in zip(*(r["correct"] for r in ranks)) for x in step]
    return sum(interleaved[:total]) / total


if __name__ == "__main__":
    for seed in range(8):
        d = make(seed); assert right(d["ranks"]) == single(d["all"])
        naive = sum(sum(r["correct"]) for r in d["ranks"]) / sum(len(r["correct"]) for r in d["ranks"])
        print(len(d["all"]), right(d["ranks"]), "with repeats it would be", round(naive, 4))
