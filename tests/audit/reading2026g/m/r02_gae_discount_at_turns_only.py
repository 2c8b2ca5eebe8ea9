"""GAE whose discount and lambda act at turn borders only. Inside a turn gamma = lambda = 1; both fall below 1 only when the trajectory passes from one assistant turn to the next (multi-turn PPO as in VAGEN/RAGEN, verl-agent). Tool tokens are not in the stream at all: the next value of a turn's last token is that of the first token of the next turn."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "[action tokens], flat stream of the action tokens of all trajectories, in order; reward sits on the last token of a turn, else 0",
          "groups": "[action tokens], trajectory number of each token, contiguous",
          "turn_ids": "[action tokens], turn number inside the trajectory, nondecreasing",
          "values": "[action tokens], value head's estimates (constants)"}
SETTINGS = {"gamma_turn": "discount at each turn border, 0.9", "lam_turn": "GAE lambda at each turn border, 0.8"}
NOTES = "No whitening: the advantages are not mean zero. Value after the last token of a trajectory is 0 (terminal). Nothing leaks between trajectories. groups here are trajectories, not prompts. The input tensors are not changed."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups, turns, rewards = [], [], []
    for traj in range(4):
        n_turns = int(torch.randint(1, 4, (1,), generator=g))
        for k in range(n_turns):
            n = int(torch.randint(1, 5, (1,), generator=g))
            groups += [traj] * n
            turns += [k] * n
            rewards += [0.0] * (n - 1) + [float(torch.rand(1, generator=g))]
    N = len(groups)
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "turn_ids": torch.tensor(turns),
            "values": torch.randn(N, generator=g)}


def right(rewards, groups, turn_ids, values, gamma_turn=0.9, lam_turn=0.8):
    adv = torch.zeros_like(rewards)
    run = rewards.new_zeros(())
    N = len(rewards)
    for i in range(N - 1, -1, -1):
        if i == N - 1 or groups[i + 1] != groups[i]:
            gamma, lam, nxt, run = 0.0, 0.0, rewards.new_zeros(()), rewards.new_zeros(())
        else:
            same = bool(turn_ids[i + 1] == turn_ids[i])
            gamma, lam = (1.0, 1.0) if same else (gamma_turn, lam_turn)
            nxt = values[i + 1]
        run = rewards[i] + gamma * nxt - values[i] + gamma * lam * run
        adv[i] = run
    return adv


if __name__ == "__main__":
    b = make(0)
    out = right(**b)
    # explicit: within a turn advantage(token) = G(turn) - V(token), G(turn) = r + gamma*(V(next first) + lam*A(next first))
    ref = torch.zeros_like(out)
    for traj in b["groups"].unique():
        idx = (b["groups"] == traj).nonzero()[:, 0].tolist()
        ks = sorted({int(b["turn_ids"][i]) for i in idx}, reverse=True)
        G = None
        for k in ks:
            mine = [i for i in idx if b["turn_ids"][i] == k]
            r = sum(float(b["rewards"][i]) for i in mine)
            boot = 0.0 if G is None else 0.9 * (nxtV + 0.8 * (G - nxtV))
            G = r + boot
            for i in mine:
                ref[i] = G - b["values"][i]
            nxtV = float(b["values"][mine[0]])
    print(out[:6], ref[:6])
    assert torch.allclose(out, ref, atol=1e-5)
    z = dict(b, values=torch.zeros_like(b["values"]))
    print("with zero values: discounted by turns", right(**z, lam_turn=1.0)[:6])
