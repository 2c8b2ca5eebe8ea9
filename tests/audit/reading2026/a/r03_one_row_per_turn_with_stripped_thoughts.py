"""A trajectory becomes one row per turn, because the thoughts of earlier turns are stripped from the context.
At generation the template drops the thinking of past turns, so a single concatenated row would show a context that the
policy never saw. Each turn is its own row with the history as it was then; earlier answers appear again as context but
are trained only in the row of their own turn. The weights of the rows of a trajectory add up to 1."""
FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of trajectories: 'turns' = list of {'user', 'think', 'answer'} (ids), 'advantage' a number"}
SETTINGS = {}
NOTES = ("Returns rows with ids, loss_mask, advantage, weight and trajectory. Trained: thoughts and answer of the last turn in "
         "the row. More rows come out than trajectories go in; repeated history is intended.")
import random

def make(seed):
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(5, 40) for _ in range(n)]
    return {"rows": [{"turns": [{"user": ids(3), "think": ids(4), "answer": ids(2)} for _ in range(n)], "advantage": rng.gauss(0, 1)}
                     for n in (3, 1, 2)]}

def right(rows):
    out = []
    for index, row in enumerate(rows):
        history = []
        for turn in row["turns"]:
            prompt = history + turn["user"]
            sampled = turn["think"] + turn["answer"]
            out.append({"ids": prompt + sampled, "loss_mask": [0] * len(prompt) + [1] * len(sampled),
                        "advantage": row["advantage"], "weight": 1 / len(row["turns"]), "trajectory": index})
            history = prompt + turn["answer"]              # thoughts are gone from the next context
    return out

if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    sampled = sum(len(t["think"]) + len(t["answer"]) for r in d["rows"] for t in r["turns"])
    trained = sum(sum(r["loss_mask"]) for r in out)
    weights = [sum(r["weight"] for r in out if r["trajectory"] == i) for i in range(3)]
    print("rows", len(out), "sampled tokens", sampled, "trained tokens", trained, "weights", weights)
    assert sampled == trained and all(abs(w - 1) < 1e-9 for w in weights) and len(out) == 6
