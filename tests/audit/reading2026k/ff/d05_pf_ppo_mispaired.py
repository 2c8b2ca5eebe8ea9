"""PF-PPO resampling moves the advantages but not the trajectories. verl-project/verl#7956,
https://github.com/verl-project/verl/issues/7956, 2026. PF-PPO reweights by resampling the whole batch with replacement. The v1
trainer resampled the batch for the advantage step and then wrote only advantages and returns back under the original keys, so each
trajectory was trained with the advantage of another trajectory. No error, the metrics look plausible."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: key (str), response (list of token ids), logprobs (list, one per response token), score (float), advantages (list, one per response token)"}
SETTINGS = {"power": "weights are |score| ** power, 2", "seed": "seed of the resampling, 7"}
NOTES = ("PF-PPO: draw len(rows) rows with replacement, with probability proportional to |score| ** power, from a generator seeded with `seed`. "
         "Every field of an output row comes from one and the same input row; key is the key of that input row. The number of rows is kept; rows may repeat "
         "or vanish by design. All rows of a batch have responses of equal length here.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(8):
        n = 5
        s = float(torch.randn((), generator=g)) + 0.1
        rows.append({"key": f"k{i}", "response": torch.randint(0, 40, (n,), generator=g).tolist(),
                     "logprobs": (-torch.rand(n, generator=g)).tolist(), "score": s,
                     "advantages": (s + 0.1 * torch.randn(n, generator=g)).tolist()})
    return {"rows": rows}


def _draw(rows, power, seed):
    w = torch.tensor([abs(r["score"]) ** power for r in rows])
    g = torch.Generator().manual_seed(seed)
    return torch.multinomial(w, len(rows), replacement=True, generator=g).tolist()


def broken(rows, power=2, seed=7):
    idx = _draw(rows, power, seed)
    resampled = [rows[i]["advantages"] for i in idx]
    out = [dict(r) for r in rows]
    for r, a in zip(out, resampled):
        r["advantages"] = list(a)
    return out


def right(rows, power=2, seed=7):
    idx = _draw(rows, power, seed)
    return [dict(rows[i], advantages=list(rows[i]["advantages"])) for i in idx]


if __name__ == "__main__":
    rows = make(0)["rows"]
    own = {r["key"]: r["advantages"] for r in rows}
    for f in (broken, right):
        bad = sum(r["advantages"] != own[r["key"]] for r in f(rows))
        print(f.__name__, "rows with the advantage of another row:", bad)
        assert (bad > 0) == (f is broken)
