"""Right: a rollout whose context was compacted gives several rows. The same tokens occur in more than one row (as context), yet each sampled token is trained in exactly one row, and the rows of a rollout share a weight of 1."""
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "rollouts {steps: list of {prompt: ids sent to the model, completion: ids it sampled}, advantage}; a step's prompt either extends the previous prompt + completion or is a rewritten (shortened) context"}
SETTINGS = {}
NOTES = ("Returns rows {ids, mask, advantage, weight}. Steps that extend the current row are joined, with the tokens between (tool output) masked out; a rewritten context opens a new row. mask 1 on sampled tokens only, each sampled token once. "
         "weight = sampled tokens of the row / sampled tokens of the rollout, so the weights of a rollout add up to 1.")

def make(seed):
    r = random.Random(seed)
    new = lambda n: [r.randint(1, 49) for _ in range(n)]
    rows = []
    for i in range(4):
        prompt, steps = new(4), []
        for s in range(r.randint(2, 5)):
            completion = new(r.randint(2, 4))
            steps.append({"prompt": list(prompt), "completion": completion})
            if s % 2 == 1:  # compaction: head of the context and the last answer stay
                prompt = prompt[:4] + new(1) + completion
            else:
                prompt = prompt + completion + new(2)
        rows.append({"steps": steps, "advantage": r.uniform(-1, 1)})
    return {"rows": rows}

def right(rows):
    out = []
    for rollout in rows:
        parts = []
        for step in rollout["steps"]:
            prompt, completion = step["prompt"], step["completion"]
            if parts and prompt[:len(parts[-1]["ids"])] == parts[-1]["ids"]:
                row = parts[-1]
                between = prompt[len(row["ids"]):]
            else:
                row = {"ids": [], "mask": [], "advantage": rollout["advantage"]}
                parts.append(row)
                between = prompt
            row["ids"] += between + completion
            row["mask"] += [0] * len(between) + [1] * len(completion)
        sampled = sum(sum(p["mask"]) for p in parts)
        out += [{**p, "weight": sum(p["mask"]) / sampled} for p in parts]
    return out

if __name__ == "__main__":
    made = make(0)
    out = right(**made)
    trained = [t for row in out for t, m in zip(row["ids"], row["mask"]) if m]
    sampled = [t for rollout in made["rows"] for step in rollout["steps"] for t in step["completion"]]
    print("rollouts", len(made["rows"]), "rows", len(out), "trained tokens", len(trained), "sampled", len(sampled), "weights", round(sum(r["weight"] for r in out), 6))
    assert trained == sampled and abs(sum(r["weight"] for r in out) - len(made["rows"])) < 1e-9 and len(out) > len(made["rows"])
