"""Generalized advantage estimation that jumps over tool observations: no decay and no value there, reward on the last token of the policy even when an observation ends the row.
Right: the decision process has one step for each token of the policy; observations are part of the next state. Same idea as radixark/miles#1827."""
import torch

FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "outcome of each row, [rows]", "values": "critic output at every position, [rows, time]", "loss_mask": "1 on tokens of the policy, [rows, time]"}
SETTINGS = {"gamma": "0.95", "lam": "0.9"}
NOTES = "GAE over the policy's tokens only; the reward sits on the last of them; next value is the value at the next policy token, 0 after the last. Advantages 0 on observations. Constants. No groups."


def right(rewards, values, loss_mask, gamma=0.95, lam=0.9):
    B, T = values.shape
    adv = torch.zeros_like(values)
    carry, next_v = torch.zeros(B), torch.zeros(B)
    pending = rewards.clone()
    for t in reversed(range(T)):
        on = loss_mask[:, t] > 0
        delta = pending + gamma * next_v - values[:, t]
        new = delta + gamma * lam * carry
        carry = torch.where(on, new, carry)
        next_v = torch.where(on, values[:, t], next_v)
        pending = torch.where(on, torch.zeros_like(pending), pending)
        adv[:, t] = torch.where(on, new, torch.zeros_like(new))
    return adv


def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(4, 16, generator=g) < 0.6).float()
    mask[:, 0] = 1
    mask[1, -4:] = 0
    return {"rewards": torch.rand(4, generator=g), "values": torch.randn(4, 16, generator=g), "loss_mask": mask}


if __name__ == "__main__":
    x = make(0)
    a = right(**x)
    for b in range(4):
        idx = x["loss_mask"][b].nonzero().flatten().tolist()
        v = [float(x["values"][b, i]) for i in idx] + [0.0]
        run, want = 0.0, {}
        for k in reversed(range(len(idx))):
            r = float(x["rewards"][b]) if k == len(idx) - 1 else 0.0
            run = r + 0.95 * v[k + 1] - v[k] + 0.95 * 0.9 * run
            want[idx[k]] = run
        for t in range(16):
            assert abs(float(a[b, t]) - want.get(t, 0.0)) < 1e-5
    print("equal to GAE on the compressed rows; row 1", [round(t, 2) for t in a[1].tolist()])
