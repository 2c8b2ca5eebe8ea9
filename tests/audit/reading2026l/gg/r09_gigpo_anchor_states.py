"""GiGPO (Group-in-Group, arXiv:2505.10978, verl-agent): besides the advantage of the episode, steps of different episodes (and of the same episode) that start from the same
environment state are compared with each other. A step whose state occurs once gets nothing from the second term; the same trajectory may stand twice in one state group."""
import torch

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "advantages"
INPUTS = {
    "rewards": "reward of each step, [steps]", "groups": "task number of each step, [steps]",
    "episodes": "episode number of each step (unique over tasks), [steps]; the steps of an episode stand together in time order",
    "states": "number of the environment state from which the step was taken, [steps]; equal numbers in one task mean the same state",
}
SETTINGS = {"gamma": "discount per step, 0.9", "omega": "weight of the step term, 1.0", "eps": "added to the standard deviations, 1e-6"}
NOTES = ("GiGPO. Episode term: the undiscounted sum of an episode's rewards, minus the mean and divided by (standard deviation + eps) over the episodes of the task, each episode counting once; the same for all its steps. "
         "Step term: discounted return from the step to the end of its episode, minus mean and divided by (standard deviation + eps) over all steps of the task that start from the same state; 0 if no other step does. "
         "advantage = episode term + omega * step term. Standard deviations of the sample (n-1). One advantage per step, to be given to all tokens that the policy wrote in the step; constant, [steps].")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    groups, ep, st, rw, e = [], [], [], [], 0
    for task in range(2):
        for _ in range(4):
            n = int(torch.randint(3, 6, (), generator=g))
            groups += [task] * n; ep += [e] * n
            st += [0] + torch.randint(0, 5, (n - 1,), generator=g).tolist()
            rw += [0.0] * (n - 1) + [float(torch.rand((), generator=g) < 0.5)]
            e += 1
    rewards = torch.tensor(rw) - 0.1 * torch.rand(len(rw), generator=g)
    return {"rewards": rewards, "groups": torch.tensor(groups), "episodes": torch.tensor(ep), "states": torch.tensor(st)}


def right(rewards, groups, episodes, states, gamma=0.9, omega=1.0, eps=1e-6):
    T = len(rewards)
    ret, run = torch.zeros(T), 0.0
    for t in reversed(range(T)):
        run = rewards[t] + (gamma * run if t + 1 < T and episodes[t + 1] == episodes[t] else 0.0)
        ret[t] = run
    _, first = torch.unique_consecutive(episodes, return_inverse=True)
    total = torch.zeros(int(first.max()) + 1).index_add_(0, first, rewards)
    task = torch.zeros_like(total).index_copy_(0, first, groups.to(total.dtype))
    a_ep = torch.zeros_like(total)
    for k in task.unique():
        i = task == k
        a_ep[i] = (total[i] - total[i].mean()) / (total[i].std() + eps)
    a_st = torch.zeros(T)
    key = groups * (states.max() + 1) + states
    for k in key.unique():
        i = key == k
        if i.sum() > 1:
            a_st[i] = (ret[i] - ret[i].mean()) / (ret[i].std() + eps)
    return a_ep[first] + omega * a_st


if __name__ == "__main__":
    m = make(0); a = right(**m); N = len(a)
    R, G, E, S = (m[k].tolist() for k in ("rewards", "groups", "episodes", "states"))

    def z(v, xs):
        mu = sum(xs) / len(xs); sd = (sum((x - mu) ** 2 for x in xs) / (len(xs) - 1)) ** 0.5
        return (v - mu) / (sd + 1e-6)
    ret = [sum(0.9 ** (u - t) * R[u] for u in range(t, N) if E[u] == E[t]) for t in range(N)]
    for t in range(N):
        tot = {e: sum(R[u] for u in range(N) if E[u] == e) for e in set(E) if G[E.index(e)] == G[t]}
        same = [ret[u] for u in range(N) if G[u] == G[t] and S[u] == S[t]]
        assert abs(a[t] - (z(tot[E[t]], list(tot.values())) + (z(ret[t], same) if len(same) > 1 else 0))) < 1e-3
    print(a)
