"""Discount applied once per turn, not per token. As in turn-level credit assignment for tool agents (VAGEN's bi-level estimator, ArCHer): gamma is paid when passing from a turn to the one before, tokens inside a turn share the return, and observation tokens pass the running return on without discount and without reset. The scan ignores the number of tokens between two actions, and mask 0 is not the end of the episode."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward per token, [rows, time], non-zero only on the last token of a model turn", "groups": "turn number of each token, [rows, time], 0, 1, 2 ...; -1 for observation and padding tokens"}
SETTINGS = {"gamma": "discount per turn, 0.9"}
NOTES = "Discounted return per token, zero on observation and padding tokens. No baseline, no normalisation. gamma per turn boundary. Works for any number of rows."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    turn = torch.tensor([[0, 0, 0, -1, -1, 1, 1, -1, 2, 2, 2, -1], [0, -1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1], [0, 0, -1, -1, 1, -1, 2, -1, 3, 3, 3, 3]])
    rew = torch.zeros(3, 12)
    for i in range(3):
        for k in range(int(turn[i].max()) + 1):
            rew[i, int((turn[i] == k).nonzero()[-1])] = torch.rand((), generator=g)
    return {"rewards": rew, "groups": turn, "gamma": 0.9}


def right(rewards, groups, gamma=0.9):
    rows, time = rewards.shape
    out = torch.zeros_like(rewards)
    run = torch.zeros(rows)
    last = torch.full((rows,), -1)                    # turn seen last, coming from the right
    for t in range(time - 1, -1, -1):
        act = groups[:, t] >= 0
        new = act & (last >= 0) & (groups[:, t] != last)
        run = torch.where(new, run * gamma, run)
        run = torch.where(act, run + rewards[:, t], run)
        last = torch.where(act, groups[:, t], last)
        out[:, t] = torch.where(act, run, torch.zeros_like(run))
    return out


if __name__ == "__main__":
    m = make(0); a = right(**m)
    for i in range(3):
        for t in range(12):
            k = int(m["groups"][i, t])
            want = 0.0 if k < 0 else sum(0.9 ** (int(m["groups"][i, s]) - k) * m["rewards"][i, s].item() for s in range(t, 12) if m["groups"][i, s] >= 0)
            assert abs(a[i, t].item() - want) < 1e-5
    print(a)
