"""Number of time-discretisation steps of consistency training: N(k) = ceil(sqrt(k/K*((s1+1)^2 - s0^2) + s0^2) - 1) + 1 (Song et al. 2023,
'Consistency Models', Appendix C). It grows, in integer stairs, like a square root of the step; 'minus one inside, plus one outside' and the end
value s1+1 look like off-by-one errors but are as published (N counts points, N-1 intervals)."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "training step k, 0-based"}
SETTINGS = {"s0": "initial discretisation steps, 2", "s1": "final discretisation steps, 150", "total": "all training steps K, 1000"}
NOTES = ("Returns a whole number as a float: how many time points the noise range is cut into at this step. Not a rate: RISES from s0 (2) to s1+1 (151). "
         "Clamped to the end value after total. Not a smooth function of the step: some steps repeat the value, early ones may skip numbers for a short total.")


def make(seed):
    return {"step": (111 * seed) % 1001}


def right(step, s0=2, s1=150, total=1000):
    k = min(step, total)
    inside = k * ((s1 + 1) ** 2 - s0 ** 2) / total + s0 ** 2
    return float(math.ceil(math.sqrt(inside) - 1) + 1)


def slow(step, s0, s1, total):
    """Smallest whole n with n^2 >= s0^2 + k/K*((s1+1)^2 - s0^2), in exact integers."""
    k, n = min(step, total), 1
    while n * n * total < k * ((s1 + 1) ** 2 - s0 ** 2) + s0 ** 2 * total:
        n += 1
    return n


if __name__ == "__main__":
    for s0, s1, total in ((2, 150, 1000), (2, 10, 77), (10, 1280, 5000)):
        v = [right(k, s0, s1, total) for k in range(total + 1)]
        assert v[0] == s0 and v[-1] == s1 + 1 and right(2 * total, s0, s1, total) == s1 + 1
        assert all(a <= b for a, b in zip(v, v[1:]))
        assert v == [slow(k, s0, s1, total) for k in range(total + 1)]
        print(s0, s1, total, "first", v[:6], "last", v[-3:])
