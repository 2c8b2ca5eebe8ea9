"""Rewards divided by the running std of the discounted RETURN, without subtracting any mean (gym VecNormalize): subtracting would change the sign of rewards and with it the task. The return estimate runs forward in time (R = gamma R + r) and resets at the end of an episode AFTER it is counted."""
FAMILY = "state"; KIND = "state"
INPUTS = {"rewards": "list over time of lists over environments", "dones": "same shape, bool", "state": "dict n, mean, m2, ret (list); None at the start"}
SETTINGS = {"gamma": "0.99", "clip": "10"}
NOTES = "right -> (scaled rewards, state). Statistics updated before scaling the same step. Signs of rewards are kept. State must be saved for resuming; frozen in evaluation. Count starts at 1e-4, variance at 1."
import random
def make(seed):
    r = random.Random(seed); return {"rewards": [[r.gauss(1, 5) for _ in range(3)] for _ in range(20)], "dones": [[r.random() < 0.2 for _ in range(3)] for _ in range(20)], "state": None}
def right(rewards, dones, state=None, gamma=0.99, clip=10.0):
    s = {"n": 1e-4, "mean": 0.0, "m2": 1e-4, "ret": [0.0] * len(rewards[0])} if state is None else {**state, "ret": list(state["ret"])}
    out = []
    for rs, ds in zip(rewards, dones):
        s["ret"] = [gamma * a + b for a, b in zip(s["ret"], rs)]
        for x in s["ret"]:
            s["n"] += 1; d = x - s["mean"]; s["mean"] += d / s["n"]; s["m2"] += d * (x - s["mean"])
        std = (s["m2"] / s["n"] + 1e-8) ** 0.5
        out.append([max(-clip, min(clip, r / std)) for r in rs])
        s["ret"] = [0.0 if d else a for a, d in zip(s["ret"], ds)]
    return out, s
if __name__ == "__main__":
    d = make(0); full, s = right(**d)
    a, s1 = right(d["rewards"][:8], d["dones"][:8]); b, s2 = right(d["rewards"][8:], d["dones"][8:], s1)
    assert a + b == full and s == s2 and all((x > 0) == (y > 0) for p, q in zip(full, d["rewards"]) for x, y in zip(p, q)); print(s["n"], s["mean"], full[-1])
