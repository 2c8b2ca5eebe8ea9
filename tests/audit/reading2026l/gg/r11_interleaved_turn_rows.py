"""Interleaved rollouts (prime-rl / verifiers, SkyRL, rLLM 'prefix merging'): turns whose prompt extends the tokens so far literally are merged into one row with the observation between masked out;
where the prompt does not extend them (the harness cut thinking or compacted the context) a new row begins. An episode gives one or several rows, and prompts are trained in none."""
import random

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "data stage"
INPUTS = {"rows": "turns in time order, the turns of an episode together; each a dict: 'episode', 'prompt_ids' (all that the model saw), 'completion_ids' (what it sampled), "
                  "'logprobs' (of completion_ids, when sampled), 'advantage' (of the episode, the same in its turns)"}
SETTINGS = {}
NOTES = ("Output rows: dict 'episode', 'ids', 'loss_mask', 'logprobs', 'advantage', all lists as long as ids except episode and advantage. A row starts with the prompt of a turn (mask 0, logprob 0.0) and its completion (mask 1, recorded logprobs). "
         "The next turn of the same episode is appended if its prompt begins with exactly the ids of the row so far: the rest of its prompt is an observation (mask 0, logprob 0.0), then its completion. Otherwise it starts a new row. "
         "Each completion token of the input is trained exactly once, under the context in which it was sampled. The advantage is copied, not split among the rows of an episode. Nothing is tokenised again.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for ep in range(4):
        ctx = [rng.randrange(50) for _ in range(4)]
        adv = rng.gauss(0, 1)
        for k in range(rng.randint(2, 4)):
            comp = [rng.randrange(50) for _ in range(rng.randint(2, 4))]
            rows.append({"episode": ep, "prompt_ids": list(ctx), "completion_ids": comp, "logprobs": [-rng.random() for _ in comp], "advantage": adv})
            obs = [rng.randrange(50) for _ in range(rng.randint(1, 3))]
            if ep % 2 and k == 0:
                ctx = ctx + comp[-1:] + obs              # the harness drops the thinking of the first turn
            else:
                ctx = ctx + comp + obs
    return {"rows": rows}


def right(rows):
    out = []
    for r in rows:
        cur = out[-1] if out else None
        p = r["prompt_ids"]
        if cur is None or cur["episode"] != r["episode"] or p[:len(cur["ids"])] != cur["ids"]:
            cur = {"episode": r["episode"], "ids": [], "loss_mask": [], "logprobs": [], "advantage": r["advantage"]}
            out.append(cur)
        new = p[len(cur["ids"]):]
        cur["ids"] = cur["ids"] + new + r["completion_ids"]
        cur["loss_mask"] = cur["loss_mask"] + [0] * len(new) + [1] * len(r["completion_ids"])
        cur["logprobs"] = cur["logprobs"] + [0.0] * len(new) + r["logprobs"]
    return out


if __name__ == "__main__":
    m = make(0); out = right(**m)
    want = [(r["episode"], tuple(r["prompt_ids"]), r["completion_ids"], r["logprobs"]) for r in m["rows"]]
    got = []
    for o in out:
        assert len(o["ids"]) == len(o["loss_mask"]) == len(o["logprobs"])
        t = 0
        while t < len(o["ids"]):
            if o["loss_mask"][t]:
                s = t
                while t < len(o["ids"]) and o["loss_mask"][t]:
                    t += 1
                got.append((o["episode"], tuple(o["ids"][:s]), o["ids"][s:t], o["logprobs"][s:t]))
            else:
                t += 1
    print(len(m["rows"]), "turns ->", len(out), "rows")
    assert got == want and 4 < len(out) < len(m["rows"])
