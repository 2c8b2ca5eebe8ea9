"""Adafactor's second-moment decay beta2(t) = 1 - t^-0.8 (Shazeer & Stern 2018, section 7.2). It is exactly 0 at the first step (the average is
overwritten by the first squared gradient) and creeps to 1, so there is NO bias correction: the weights of the average always sum to one."""

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based; the paper's t is step + 1"}
SETTINGS = {"power": "decay exponent, 0.8"}
NOTES = ("Returns beta2 of v = beta2*v + (1-beta2)*g^2. 0.0 at step 0 by design, rises without end towards 1, never reaches it. Independent of the run's length. "
         "Not a learning rate. step must be >= 0 (t = 0 would divide by zero, hence the +1).")


def make(seed):
    return {"step": (29 * seed) % 1000}


def right(step, power=0.8):
    return 1.0 - float(step + 1) ** -power


if __name__ == "__main__":
    beta = [right(s) for s in range(1000)]
    assert beta[0] == 0.0 and all(a < b < 1 for a, b in zip(beta, beta[1:])) and abs(beta[31] - (1 - 32 ** -0.8)) < 1e-15 and abs(beta[31] - 0.9375) < 1e-12
    # weight of each past gradient in v, by an explicit loop: sums to 1 at each time without correction
    for horizon in (1, 2, 10, 1000):
        w = [0.0] * horizon
        for t in range(horizon):
            w = [x * beta[t] for x in w]
            w[t] = 1 - beta[t]
        print(horizon, "sum of weights", sum(w), "weight of the first", w[0])
        assert abs(sum(w) - 1) < 1e-12
    v = 0.0                                       # constant gradient 3: v is 9 from the first step on
    for b in beta:
        v = b * v + (1 - b) * 9.0
        assert abs(v - 9) < 1e-9
