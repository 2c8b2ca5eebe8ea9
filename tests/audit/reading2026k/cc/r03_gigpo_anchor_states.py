"""Group-in-group advantages of GiGPO (arXiv 2505.10978, verl-agent): the advantage of a step is the normalised return of its episode within the group of the prompt plus
omega times the normalised discounted return of the step among all steps of the group that started from the same state of the environment ("anchor state"), wherever in the
episodes they are. A state may occur twice in one episode; a state that occurs once adds nothing. Steps of one episode so have different advantages, and a step may be
grouped with steps at another position."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of the step, [rows], one row per step", "groups": "prompt id, [rows]", "rollouts": "episode id, [rows]; the rows of an episode stand together, in order of time",
          "states": "id of the state of the environment before the step, [rows]"}
SETTINGS = {"gamma": "discount per step, 0.95", "omega": "weight of the step part, 1.0", "eps": "added to the standard deviations, 1e-6"}
NOTES = ("A = A_episode + omega * A_step. A_episode: (sum of the rewards of the episode - mean over the episodes of the prompt) / (unbiased std over them + eps). "
         "A_step: discounted return of the step (rewards from this step on), minus the mean over all steps of the same prompt with the same state, divided by their unbiased std + eps; 0 for a state that occurs once in the prompt. Prompts do not influence each other. Each prompt has at least two episodes.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, groups, rollouts, states = [], [], [], []
    k = 0
    for p in range(2):
        for _ in range(3):
            n = int(torch.randint(2, 6, (1,), generator=g))
            for s in range(n):
                rewards.append(float(torch.rand(1, generator=g)) if s == n - 1 else (0.1 if float(torch.rand(1, generator=g)) < 0.3 else 0.0))
                groups.append(p); rollouts.append(k)
                states.append(0 if s == 0 else int(torch.randint(1, 6, (1,), generator=g)))
            k += 1
    return {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups), "rollouts": torch.tensor(rollouts), "states": torch.tensor(states)}


def right(rewards, groups, rollouts, states, gamma=0.95, omega=1.0, eps=1e-6):
    n = len(rewards)
    returns = torch.zeros_like(rewards)
    for i in reversed(range(n)):
        nxt = returns[i + 1] if i + 1 < n and rollouts[i + 1] == rollouts[i] else 0.0
        returns[i] = rewards[i] + gamma * nxt
    out = torch.zeros_like(rewards)
    for p in groups.unique():
        rows = (groups == p).nonzero().squeeze(-1)
        ids = rollouts[rows].unique()
        total = {int(k): rewards[rollouts == k].sum() for k in ids}
        all_totals = torch.stack(list(total.values()))
        for i in rows.tolist():
            same = rows[states[rows] == states[i]]
            a = (total[int(rollouts[i])] - all_totals.mean()) / (all_totals.std() + eps)
            if len(same) > 1:
                a = a + omega * (returns[i] - returns[same].mean()) / (returns[same].std() + eps)
            out[i] = a
    return out


if __name__ == "__main__":
    x = make(0)
    a = right(**x)
    r, g, k, s = (x[c].tolist() for c in ("rewards", "groups", "rollouts", "states"))
    import statistics as st
    for i in range(len(r)):
        eps_tot = {}
        for j in range(len(r)):
            if g[j] == g[i]:
                eps_tot[k[j]] = eps_tot.get(k[j], 0.0) + r[j]
        def ret(i):
            z, d = 0.0, 1.0
            for j in range(i, len(r)):
                if k[j] != k[i]:
                    break
                z += d * r[j]; d *= 0.95
            return z
        want = (eps_tot[k[i]] - st.mean(eps_tot.values())) / (st.stdev(eps_tot.values()) + 1e-6)
        same = [ret(j) for j in range(len(r)) if g[j] == g[i] and s[j] == s[i]]
        if len(same) > 1:
            want += (ret(i) - st.mean(same)) / (st.stdev(same) + 1e-6)
        assert abs(want - float(a[i])) < 1e-3, (i, want, float(a[i]))
    print(a)
