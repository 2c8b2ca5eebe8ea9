"""Multi-turn GAE that jumps over tool results: the next value of the last token of a turn is the value of the first token of the NEXT turn, not of the
following column (as the masked recursion of verl), and the discount applies only between turns; inside a turn it is 1. Values on observations are never read."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward per token, [rows, time]; non-zero on trained tokens only (the environment pays on the last token of a turn)",
          "groups": "number of the assistant turn of the token, -1 for prompt, tool results and padding, [rows, time]; rises from left to right",
          "values": "value of the state before the token, [rows, time]; garbage where groups is -1"}
SETTINGS = {"gamma": "discount from turn to turn, 0.9", "lam": "GAE lambda per token, 0.95"}
NOTES = ("Result [rows, time], 0 where groups is -1. Not whitened. The last trained token of a row is terminal (bootstrap value 0). gamma per turn, lambda per token. "
         "Constants: all inputs; the result carries no gradient. Columns of observations may be removed or added without any change of the other entries.")
import torch


@torch.no_grad()
def right(rewards, groups, values, gamma=0.9, lam=0.95):
    rows, time = rewards.shape
    adv = torch.zeros_like(rewards)
    next_value, next_adv = rewards.new_zeros(rows), rewards.new_zeros(rows)
    next_turn = torch.full((rows,), -1, dtype=groups.dtype)
    for t in range(time - 1, -1, -1):
        live = groups[:, t] >= 0
        g = torch.where(next_turn == groups[:, t], 1.0, gamma)
        delta = rewards[:, t] + g * next_value - values[:, t]
        a = delta + g * lam * next_adv
        next_value = torch.where(live, values[:, t], next_value)
        next_adv = torch.where(live, a, next_adv)
        next_turn = torch.where(live, groups[:, t], next_turn)
        adv[:, t] = torch.where(live, a, torch.zeros_like(a))
    return adv


def make(seed, rows=4, time=16):
    g = torch.Generator().manual_seed(seed)
    groups = torch.full((rows, time), -1)
    rewards = torch.zeros(rows, time)
    for b in range(rows):
        t, k = 1 + b % 2, 0
        while t < time and k < 3:
            n = min(int(torch.randint(1, 4, (1,), generator=g)), time - t)
            groups[b, t:t + n] = k
            rewards[b, t + n - 1] = torch.randn(1, generator=g)
            t, k = t + n + int(torch.randint(1, 3, (1,), generator=g)), k + 1
    return {"rewards": rewards, "groups": groups, "values": torch.randn(rows, time, generator=g)}


if __name__ == "__main__":
    for seed in range(10):
        c = make(seed)
        got = right(**c)
        for b in range(len(got)):
            at = [t for t in range(got.shape[1]) if c["groups"][b, t] >= 0]        # compact row without observations
            r, v, k = c["rewards"][b, at].tolist(), c["values"][b, at].tolist() + [0.0], c["groups"][b, at].tolist()
            for i in range(len(at)):
                want, w = 0.0, 1.0
                for j in range(i, len(at)):                                      # explicit double sum
                    g = 1.0 if j + 1 < len(at) and k[j + 1] == k[j] else 0.9
                    want += w * (r[j] + g * v[j + 1] - v[j])
                    w *= g * 0.95
                assert abs(float(got[b, at[i]]) - want) < 1e-5
        noisy = dict(c, values=torch.where(c["groups"] < 0, torch.full_like(c["values"], 1e3), c["values"]))
        assert torch.equal(right(**noisy), got) and (got[c["groups"] < 0] == 0).all()
        one = right(**c, gamma=1.0, lam=1.0)                                      # then reward to go minus value
        to_go = c["rewards"].flip(1).cumsum(1).flip(1) - c["values"]
        assert torch.allclose(one[c["groups"] >= 0], to_go[c["groups"] >= 0], atol=1e-5)
    print("ok", got[0].tolist())
