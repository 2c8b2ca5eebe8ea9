"""Square-root competence curriculum. The share of the (difficulty-sorted) data that may be drawn grows as sqrt(t (1-c0^2)/T + c0^2), with squares of c0 inside the root; for most of the run hard examples are never seen. Platanios et al. 2019, "Competence-based curriculum learning for NMT"."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0"}
SETTINGS = {"c0": "share of the data at step 0, 0.01", "length": "steps until all data is used, 400"}
NOTES = ("Returns the share of examples (by difficulty rank, CDF values in (0, 1]) from which batches are drawn uniformly. Equals c0 at step 0, 1 from length on (at length itself up to rounding). "
         "The square of the competence is linear in the step, so that new examples arrive at a rate inversely proportional to the size of the current pool.")
import math


def right(step, c0=0.01, length=400):
    return min(1.0, math.sqrt(step * (1.0 - c0 ** 2) / length + c0 ** 2))


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(600)}


if __name__ == "__main__":
    v = [right(s) for s in range(600)]
    assert abs(v[0] - 0.01) < 1e-15 and abs(v[400] - 1) < 1e-12 and set(v[401:]) == {1.0}
    # the differential equation of the paper dc/dt = P / c, integrated slowly
    P, c = (1 - 0.01 ** 2) / 2 / 400, v[100]
    for i in range(100 * 1000):
        c += 1e-3 * P / c
    assert abs(c - v[200]) < 1e-5
    # at share c the hardest drawable of 1000 sorted examples
    assert math.ceil(v[100] * 1000) == 501
    print("share at 0, 100, 200, 400:", v[0], v[100], v[200], v[400], "integrated", c)
