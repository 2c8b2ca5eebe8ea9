"""The averaging coefficient starts near 0.1 and grows towards 0.999; at first the average is thrown away almost wholly.
Right: warm-up of an exponential moving average of weights, min(decay, (1 + t) / (10 + t)), so that the random start does not stay in the average. It grows with time; it is not a learning rate."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "number of averaging updates done so far, from 0"}
SETTINGS = {"decay": "final coefficient of the old average, 0.999", "every": "weights are averaged each 5 optimizer steps; other steps give 1.0 (keep the average)"}
NOTES = "average = d * average + (1 - d) * weights with d = this schedule, step counts optimizer steps; on steps that are not a multiple of every, d = 1."


def right(step, decay=0.999, every=5):
    if step % every:
        return 1.0
    t = step // every
    return min(decay, (1 + t) / (10 + t))


def make(seed):
    return {"step": 5 * (3 + seed)}


if __name__ == "__main__":
    print([right(s) for s in (0, 1, 5, 50, 500, 5000, 50000)])
    avg, keep = 100.0, 1.0                # average starts at a bad value, weights are 1.0
    for s in range(501):
        d = right(s)
        avg, keep = d * avg + (1 - d) * 1.0, keep * d
    print("start's share after 500 steps", keep, "average", avg)
    assert keep < 1e-10 and abs(avg - 1) < 1e-6 and right(50000) == 0.999
    v = [right(s) for s in range(0, 60000, 5)]
    assert all(a <= b for a, b in zip(v, v[1:]))
