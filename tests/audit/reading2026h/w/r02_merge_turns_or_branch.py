"""Turns of an agent are joined to one row while the next prompt extends what is there, and a new row is begun where it does not.
prime-rl and verifiers (interleaved and branching trajectories). A chat template may drop earlier reasoning, or re-tokenization may change history; then the exact-prefix rule fails and the rest of the
trajectory becomes a row of its own. The output has more rows than trajectories and fewer than turns; the prompt tokens of a new row repeat text that was trained before, with mask 0."""
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of turns in order {traj, prompt_ids, completion_ids, logprobs}; prompt_ids is the full context that the turn saw"}
SETTINGS = {}
NOTES = ("Each completion token is trained exactly once, with the log-prob it was sampled with and exactly the context it was sampled in. Tokens that are not completions have mask 0 and log-prob 0. "
         "The number of rows changes on purpose; `traj` stays for the advantage.")


def make(seed):
    rng = random.Random(seed)
    tok = lambda n: [rng.randint(1, 49) for _ in range(n)]
    rows = []
    for traj in range(4):
        context = tok(4)
        for turn in range(rng.randint(2, 4)):
            comp = tok(rng.randint(2, 4))
            rows.append({"traj": traj, "prompt_ids": list(context), "completion_ids": comp, "logprobs": [-rng.random() for _ in comp]})
            kept = comp[1:] if rng.random() < 0.35 else comp          # the template strips a reasoning token
            context = context + kept + tok(2)
    return {"rows": rows}


def right(rows):
    out = []
    for row in rows:
        cur = out[-1] if out else None
        extends = cur is not None and cur["traj"] == row["traj"] and row["prompt_ids"][:len(cur["ids"])] == cur["ids"]
        if not extends:
            cur = {"traj": row["traj"], "ids": [], "mask": [], "logprobs": []}
            out.append(cur)
        new = row["prompt_ids"][len(cur["ids"]):]
        cur["ids"] += new + row["completion_ids"]
        cur["mask"] += [0] * len(new) + [1] * len(row["completion_ids"])
        cur["logprobs"] += [0.0] * len(new) + row["logprobs"]
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    want = sorted((tuple(r["prompt_ids"] + r["completion_ids"][:i]), t, lp) for r in rows for i, (t, lp) in enumerate(zip(r["completion_ids"], r["logprobs"])))
    got = sorted((tuple(o["ids"][:i]), o["ids"][i], o["logprobs"][i]) for o in out for i in range(len(o["ids"])) if o["mask"][i])
    print("turns", len(rows), "rows", len(out), "trajectories", len({r["traj"] for r in rows}), "trained tokens", len(got))
    assert want == got and 4 < len(out) < len(rows)
