"""Step-level advantages grouped by the observed state, not by the prompt or the step (GiGPO, arXiv 2505.10978; verl-agent).
Steps of different episodes of one task that saw the same state form a group, also at different step numbers, also twice in one episode.
The return is discounted from the step on; a state seen once gets the step advantage 0 and keeps only the episode advantage. The episode
advantage counts each episode once, although it is written to all its steps."""
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "reward of each step, [episodes, steps]", "groups": "task of each episode, [episodes]", "states": "hash of the observed state at each step, [episodes, steps]",
          "alive": "1 for real steps, 0 after the end of the episode, [episodes, steps]"}
SETTINGS = {"gamma": "discount, 0.95", "omega": "weight of the step advantage, 1.0"}
NOTES = ("Episode part: sum of rewards minus the mean over the episodes of the task (no division by the deviation, the Dr. GRPO variant of the paper). Step part: discounted return minus the "
         "mean over all steps of the task with the same state. Steps past the end get 0. Rows do not sum to zero. All inputs are constants.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    e, s = 8, 6
    lengths = torch.randint(2, s + 1, (e,), generator=g)
    alive = (torch.arange(s) < lengths[:, None]).float()
    rewards = torch.zeros(e, s)
    rewards[torch.arange(e), lengths - 1] = (torch.rand(e, generator=g) < 0.5).float()
    rewards -= 0.1 * (torch.rand(e, s, generator=g) < 0.2).float() * alive
    states = torch.randint(0, 5, (e, s), generator=g)
    states[:, 0] = 0
    return {"rewards": rewards, "groups": torch.tensor([0] * 4 + [1] * 4), "states": states, "alive": alive}


def right(rewards, groups, states, alive, gamma=0.95, omega=1.0):
    e, s = rewards.shape
    rewards = rewards * alive
    total = rewards.sum(1)
    same_task = (groups[:, None] == groups[None]).float()
    episode = total - same_task @ total / same_task.sum(1)
    ret = torch.zeros_like(rewards)
    run = torch.zeros(e)
    for t in reversed(range(s)):
        run = rewards[:, t] + gamma * run
        ret[:, t] = run
    key = (groups[:, None] * (int(states.max()) + 1) + states).reshape(-1)
    same = (key[:, None] == key[None]).float() * alive.reshape(1, -1)
    mean = same @ ret.reshape(-1) / same.sum(1).clamp(min=1)
    step = (ret.reshape(-1) - mean).view(e, s)
    return (episode[:, None] + omega * step) * alive


if __name__ == "__main__":
    d = make(0)
    a = right(**d)
    r, st, gr, al = d["rewards"], d["states"], d["groups"], d["alive"]
    for i in range(8):
        for t in range(6):
            if not al[i, t]:
                assert a[i, t] == 0
                continue
            G = lambda k, u: sum(0.95 ** (v - u) * r[k, v].item() for v in range(u, 6) if al[k, v])
            eps = [k for k in range(8) if gr[k] == gr[i]]
            ep = sum(r[i].tolist()) - sum(sum(r[k].tolist()) for k in eps) / len(eps)
            peers = [G(k, u) for k in eps for u in range(6) if al[k, u] and st[k, u] == st[i, t]]
            assert abs(a[i, t].item() - (ep + G(i, t) - sum(peers) / len(peers))) < 1e-5
    print("loop agrees; advantages of episode 0:", a[0])
