"""Micro-F1 over ranks that discards the last samples gathered (Accelerate gather_for_metrics). DistributedSampler fills the ranks by repeating samples of the front; the gathered list is interleaved again and cut at the dataset size, and F1 is taken of summed counts, not averaged over ranks."""
FAMILY = "sharding"
KIND = "metric over ranks"
INPUTS = {"ranks": "one dict per rank: predicted and gold (0/1 lists of equal length over the ranks, sample k of rank r is position k*world + r), size = true dataset size"}
SETTINGS = {}
NOTES = "twin(predicted, gold) is the single-process form. Ranks hold ceil(size/world) samples each; the surplus is the repeated front. F1 of no positives is 0."
def twin(predicted, gold):
    tp = sum(p and g for p, g in zip(predicted, gold)); wrong = sum(p != g for p, g in zip(predicted, gold))
    return 2 * tp / (2 * tp + wrong) if tp else 0.0

def data(seed):
    import random
    r = random.Random(seed); n = r.randint(9, 30)
    gold = [int(r.random() < .4) for _ in range(n)]
    return [g if r.random() < .8 else 1 - g for g in gold], gold

def make(seed, world=4):
    p, g = data(seed); n = len(p); per = -(-n // world); order = [i % n for i in range(per * world)]
    return {"ranks": [{"predicted": [p[i] for i in order[r::world]], "gold": [g[i] for i in order[r::world]], "size": n} for r in range(world)]}

def right(ranks):
    size, world = ranks[0]["size"], len(ranks)
    tp = wrong = 0
    for r, part in enumerate(ranks):
        mine = [(p, g) for k, (p, g) in enumerate(zip(part["predicted"], part["gold"])) if k * world + r < size]
        tp += sum(p and g for p, g in mine); wrong += sum(p != g for p, g in mine)
    return 2 * tp / (2 * tp + wrong) if tp else 0.0

if __name__ == "__main__":
    for seed in range(50):
        for world in (1, 2, 3, 4):
            assert right(make(seed, world)["ranks"]) == twin(*data(seed))
    print(right(make(0)["ranks"]), twin(*data(0)))
