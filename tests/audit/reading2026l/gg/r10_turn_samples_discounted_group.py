"""Kevin (multi-turn RL for CUDA kernels, arXiv:2507.11948): each refinement turn is its own training sample; its reward is the discounted sum of the scores of this and the later turns,
and the normalisation runs over all turns of all trajectories of the task. Samples with different prompts stand in one group, and an early turn may have more reward than any score."""
import torch

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "advantages"
INPUTS = {
    "rewards": "score of each turn as the evaluator gave it, [turns]", "groups": "task number, [turns]",
    "trajectory": "trajectory number inside the task, [turns]", "turn": "number of the turn inside its trajectory from 0, [turns]; the rows may stand in any order",
}
SETTINGS = {"gamma": "discount per turn, 0.4", "eps": "added to the standard deviation, 1e-6"}
NOTES = ("Each turn is one sample. Its reward R = sum over this and the later turns s of its trajectory of gamma^(s - turn) * score_s (scores of later turns count for the turn that led to them; earlier ones do not). "
         "Advantage = (R - mean) / (std + eps), mean and sample standard deviation over all turns of all trajectories of the task, each turn counting once, whatever prompt it has. "
         "Trajectories may differ in their number of turns. Order of the rows is kept. Constant, [turns].")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = [(k, tr, t) for k in range(2) for tr in range(3) for t in range(int(torch.randint(2, 5, (), generator=g)))]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=g).tolist()]
    x = torch.tensor(rows)
    return {"rewards": torch.rand(len(rows), generator=g) * (torch.rand(len(rows), generator=g) < 0.7), "groups": x[:, 0], "trajectory": x[:, 1], "turn": x[:, 2]}


def right(rewards, groups, trajectory, turn, gamma=0.4, eps=1e-6):
    same = (groups[:, None] == groups) & (trajectory[:, None] == trajectory)
    ahead = turn[None, :] - turn[:, None]
    w = torch.where(same & (ahead >= 0), torch.tensor(gamma).pow(ahead.clamp(min=0)), torch.tensor(0.0))
    R = w @ rewards
    out = torch.zeros_like(R)
    for g in groups.unique():
        i = groups == g
        out[i] = (R[i] - R[i].mean()) / (R[i].std() + eps)
    return out


if __name__ == "__main__":
    m = make(0); a = right(**m); N = len(a)
    R = []
    for i in range(N):
        R.append(sum(0.4 ** int(m["turn"][j] - m["turn"][i]) * float(m["rewards"][j]) for j in range(N)
                     if m["groups"][i] == m["groups"][j] and m["trajectory"][i] == m["trajectory"][j] and m["turn"][j] >= m["turn"][i]))
    for i in range(N):
        x = [R[j] for j in range(N) if m["groups"][j] == m["groups"][i]]
        mu = sum(x) / len(x); sd = (sum((v - mu) ** 2 for v in x) / (len(x) - 1)) ** 0.5
        assert abs(a[i] - (R[i] - mu) / (sd + 1e-6)) < 1e-4
    print(a)
