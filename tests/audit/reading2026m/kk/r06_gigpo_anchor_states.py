"""GiGPO (Feng et al. 2025, arXiv 2505.10978; verl-agent). Each step of an agent gets an episode advantage plus a step advantage; steps are compared across trajectories wherever the environment was in the same state, so the groups of the
step part cut across time and trajectories, may hold several steps of one trajectory, and a state seen once gives 0."""
import torch

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "advantages"
INPUTS = {
    "rewards": "reward of each agent step, [steps]; the steps of a trajectory stand in order of time",
    "groups": "number of the task of each step, [steps]; the trajectories of one task start from the same state",
    "trajectories": "number of the trajectory of each step, [steps], unique over tasks",
    "states": "number (hash) of the environment state before each step, [steps]",
}
SETTINGS = {"gamma": "discount per step, 0.95", "omega": "weight of the step part, 1.0", "eps": "added to standard deviations, 1e-6"}
NOTES = (
    "GiGPO. Episode part: the undiscounted reward sum of each trajectory, minus the mean and divided by (standard deviation + eps) over the trajectories of the same task; each trajectory counts once however many steps it has. Step part: the discounted reward-to-go of each step, "
    "normalised in the same way over all steps of the same task with the same state number, wherever in time and in whichever trajectory they occur (each step counts once). Standard deviations divide by n-1; a set with a single member gives 0. Advantage of a step = episode part + omega*step part. "
    "Returns [steps]; all tokens of a step get its number. Constant."
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r, gr, tr, st = [], [], [], []
    for t in range(8):
        n = int(torch.randint(2, 6, (1,), generator=g))
        for s in range(n):
            gr.append(t // 4)
            tr.append(t)
            st.append(0 if s == 0 else int(torch.randint(1, 6, (1,), generator=g)))
            r.append(float(torch.rand(1, generator=g) < 0.5) if s == n - 1 else -0.1 * float(torch.rand(1, generator=g) < 0.3))
    return {"rewards": torch.tensor(r), "groups": torch.tensor(gr), "trajectories": torch.tensor(tr), "states": torch.tensor(st)}


def _norm(x, eps):
    return torch.zeros_like(x) if len(x) == 1 else (x - x.mean()) / (x.std() + eps)


def right(rewards, groups, trajectories, states, gamma=0.95, omega=1.0, eps=1e-6):
    total, to_go = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for tr in trajectories.unique():
        idx = (trajectories == tr).nonzero()[:, 0]
        total[idx] = rewards[idx].sum()
        run = 0.0
        for i in reversed(idx.tolist()):
            run = rewards[i] + gamma * run
            to_go[i] = run
    episode, step = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for gr in groups.unique():
        mine = groups == gr
        trs = trajectories[mine].unique()
        score = _norm(torch.stack([total[trajectories == tr][0] for tr in trs]), eps)
        for tr, s in zip(trs, score):
            episode[trajectories == tr] = s
        for st in states[mine].unique():
            sel = mine & (states == st)
            step[sel] = _norm(to_go[sel], eps)
    return episode + omega * step


if __name__ == "__main__":
    from statistics import mean, stdev
    for seed in range(3):
        d = make(seed)
        got = right(**d)
        R, G, T, S = (d[k].tolist() for k in ("rewards", "groups", "trajectories", "states"))
        n = len(R)
        tot = {t: sum(R[i] for i in range(n) if T[i] == t) for t in set(T)}
        want = []
        for i in range(n):
            eps_ = [tot[t] for t in set(T) if G[T.index(t)] == G[i]]
            e = (tot[T[i]] - mean(eps_)) / (stdev(eps_) + 1e-6)
            go = lambda j: sum(0.95 ** (k - j) * R[k] for k in range(j, n) if T[k] == T[j])
            peers = [go(j) for j in range(n) if G[j] == G[i] and S[j] == S[i]]
            want.append(e + ((go(i) - mean(peers)) / (stdev(peers) + 1e-6) if len(peers) > 1 else 0))
        diff = (got - torch.tensor(want)).abs().max()
        print("seed", seed, "steps", n, "first", [round(x, 3) for x in got[:6].tolist()], "difference %.1e" % diff)
        assert diff < 1e-3
