"""Evaluation over ranks where the sampler repeats the first samples to make shards even; the duplicates are dropped by truncating the INTERLEAVED gathered list to the dataset's length (Accelerate gather_for_metrics)."""
FAMILY = "metric over ranks"; KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of correctness 0/1; rank r holds samples r, r+world, … with wrap-around", "n": "dataset length"}
SETTINGS = {}
NOTES = "All ranks hold equally many. Truncation is only right after interleaving (sample-major), which this does. Single-process twin: mean of the n values."
import random
def make(seed, world=3, n=10):
    r = random.Random(seed); v = [r.randrange(2) for _ in range(n)]; k = -(-n // world) * world; w = (v + v)[:k]
    return {"ranks": [w[i::world] for i in range(world)], "n": n}
def twin(values): return sum(values) / len(values)
def right(ranks, n): 
    flat = [x for step in zip(*ranks) for x in step]
    return sum(flat[:n]) / n
if __name__ == "__main__":
    for s in range(5):
        for w in (1, 2, 3, 4, 7):
            r = random.Random(s); v = [r.randrange(2) for _ in range(10)]; assert right(**make(s, w)) == twin(v)
    print("equal to the single process for 5 seeds, 5 world sizes", right(**make(0)))
