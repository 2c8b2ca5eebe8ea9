"""Hindsight experience replay, strategy 'future' (Andrychowicz et al. 2017, stable-baselines3 HerReplayBuffer): stored transitions are copied with a goal that was reached later in the same episode,
and the reward is computed anew. It looks like leaking the future into the input, and most relabelled episodes now 'succeed'."""
import random

FAMILY = "replay and off-policy corrections"
KIND = "data stage"
INPUTS = {"rows": "transitions in time order, the ones of an episode together; each a dict: 'episode', 't', 'obs', 'action', 'next_achieved' (goal position reached after the action), 'goal' (asked for), 'reward'"}
SETTINGS = {"k": "relabelled copies per transition, 3", "seed": "seed of the choice of goals, 0"}
NOTES = ("Output: for each transition in order the original, then k copies of it. In a copy 'goal' is the next_achieved of a transition of the same episode chosen uniformly among the present and the later ones (t' >= t), "
         "and 'reward' is computed anew: 0.0 if the copy's own next_achieved equals the new goal, else -1.0. Observation, action and next_achieved stay. Episodes have a fixed horizon, so there is no terminal flag. "
         "Goals are never taken from another episode or from an earlier step. The same seed gives the same rows.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for ep in range(3):
        pos, goal = 0, rng.choice([-3, 3])
        for t in range(rng.randint(4, 6)):
            a = rng.choice([-1, 1])
            rows.append({"episode": ep, "t": t, "obs": pos, "action": a, "next_achieved": pos + a, "goal": goal, "reward": 0.0 if pos + a == goal else -1.0})
            pos += a
    return {"rows": rows}


def right(rows, k=3, seed=0):
    rng = random.Random(seed)
    end = {r["episode"]: i for i, r in enumerate(rows)}
    out = []
    for i, r in enumerate(rows):
        out.append(dict(r))
        for _ in range(k):
            goal = rows[rng.randint(i, end[r["episode"]])]["next_achieved"]
            out.append(dict(r, goal=goal, reward=0.0 if r["next_achieved"] == goal else -1.0))
    return out


if __name__ == "__main__":
    m = make(0); out = right(**m)
    assert len(out) == 4 * len(m["rows"]) and out == right(**m)
    for n, o in enumerate(out):
        r = m["rows"][n // 4]
        assert o["reward"] == (0.0 if o["goal"] == o["next_achieved"] else -1.0) and all(o[x] == r[x] for x in ("episode", "t", "obs", "action", "next_achieved"))
        if n % 4:
            assert o["goal"] in [x["next_achieved"] for x in m["rows"] if x["episode"] == r["episode"] and x["t"] >= r["t"]]
    print("mean reward before", sum(r["reward"] for r in m["rows"]) / len(m["rows"]), "after", sum(o["reward"] for o in out) / len(out))
    seen = {x["goal"] for s in range(200) for x in right(m["rows"], seed=s)[1:4]}
    assert seen == {x["next_achieved"] for x in m["rows"] if x["episode"] == 0}
