"""Tokens per second of a job. Tokens are SUMMED over the data ranks but time is the span from the earliest start to the latest end, so a fast idle rank does not help; tensor-parallel ranks that saw the same tokens count them once."""
import random
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of {'tensor_rank': rank within its tensor-parallel group, 'events': list of (start seconds, end seconds, tokens)}"}
SETTINGS = {}
NOTES = "Neither the mean nor the sum of ranks' rates. Events of ranks with tensor_rank > 0 add no tokens, but their times count. Clocks are synchronised. At least one event in all; a rank may have none. Twin: single(events of tensor_rank 0, all events)."
def make(seed):
    r = random.Random(seed)
    ranks = []
    for data in range(3):
        tokens = [r.randrange(100, 1000) for _ in range(r.randrange(0 if data else 1, 5))]
        for tensor in range(2):
            t, events = 100 + r.random(), []
            for n in tokens:
                end = t + 0.1 + r.random()
                events.append((t, end, n)); t = end + 0.05 * r.random()
            ranks.append({"tensor_rank": tensor, "events": events})
    return {"ranks": ranks}
def right(ranks):
    tokens = sum(n for r in ranks if r["tensor_rank"] == 0 for _, _, n in r["events"])     # sum
    start = min((e[0] for r in ranks for e in r["events"]))                                # min
    end = max((e[1] for r in ranks for e in r["events"]))                                  # max
    return tokens / (end - start)
def single(counted, events):
    return sum(e[2] for e in counted) / (sorted(e[1] for e in events)[-1] - sorted(e[0] for e in events)[0])
if __name__ == "__main__":
    assert right([{"tensor_rank": 0, "events": [(0.0, 1.0, 100)]}, {"tensor_rank": 0, "events": [(0.0, 2.0, 100)]}]) == 100.0
    assert right([{"tensor_rank": t, "events": [(0.0, 2.0, 100)]} for t in (0, 1)]) == 50.0
    for seed in range(20):
        ranks = make(seed)["ranks"]
        a = right(ranks)
        b = single([e for r in ranks if r["tensor_rank"] == 0 for e in r["events"]], [e for r in ranks for e in r["events"]])
        assert abs(a - b) < 1e-9
    print("ok", a, b)
