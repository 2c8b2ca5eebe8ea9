"""Merging agent steps into samples takes the first matching prefix, not the longest. PrimeIntellect-ai/prime-rl#2634,
https://github.com/PrimeIntellect-ai/prime-rl/pull/2634, 2026.
A step extends a sample if its prompt starts with that sample's tokens. Two open samples can both match when one is a strict prefix of the
other (after a rollback that regenerates the same tokens and goes on). The loop stopped at the first, shorter one: the tokens that the model
had generated in the other sample were added as untrained prompt, and the other sample was never extended."""
import random

FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "steps of one rollout in order; each a dict prompt_ids (all tokens the model saw), completion_ids (tokens it generated)"}
SETTINGS = {}
NOTES = ("Best-effort interleaving: a step whose prompt extends an open sample is merged into it (new prompt tokens mask 0, completion mask 1); "
         "otherwise it opens a sample. The step belongs to the sample it continues, that is the longest match.")


def _start(step):
    return {"ids": step["prompt_ids"] + step["completion_ids"],
            "mask": [0] * len(step["prompt_ids"]) + [1] * len(step["completion_ids"])}


def _extend(sample, step):
    new = step["prompt_ids"][len(sample["ids"]):]
    sample["ids"] = sample["ids"] + new + step["completion_ids"]
    sample["mask"] = sample["mask"] + [0] * len(new) + [1] * len(step["completion_ids"])


def broken(rows):
    samples = []
    for step in rows:
        for s in samples:
            if step["prompt_ids"][:len(s["ids"])] == s["ids"]:
                _extend(s, step)
                break
        else:
            samples.append(_start(step))
    return samples


def right(rows):
    samples = []
    for step in rows:
        best = None
        for s in samples:
            if step["prompt_ids"][:len(s["ids"])] == s["ids"] and (best is None or len(s["ids"]) > len(best["ids"])):
                best = s
        if best is None:
            samples.append(_start(step))
        else:
            _extend(best, step)
    return samples


def make(seed):
    r = random.Random(seed)
    tok = lambda n: [r.randrange(1, 50) for _ in range(n)]
    p, c0, o1, c1 = tok(r.randint(2, 4)), tok(r.randint(2, 4)), tok(2), tok(r.randint(1, 3))
    a = p + c0 + o1 + c1
    more = tok(r.randint(2, 4))
    b = a + more
    return {"rows": [
        {"prompt_ids": p, "completion_ids": c0},
        {"prompt_ids": p + c0 + o1, "completion_ids": c1},
        {"prompt_ids": p, "completion_ids": c0 + o1 + c1 + more},      # rollback; regenerates the same tokens and goes on
        {"prompt_ids": b + tok(2), "completion_ids": tok(3)},
    ]}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    for n, v in (("broken", a), ("right", b)):
        print(n, [(len(s["ids"]), sum(s["mask"])) for s in v])
    assert a != b
