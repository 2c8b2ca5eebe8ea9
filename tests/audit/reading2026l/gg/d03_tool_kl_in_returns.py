"""KL of tool-response tokens is summed into the returns. THUDM/slime#1370, https://github.com/THUDM/slime/issues/1370, 2026.
get_reinforce_plus_plus_returns builds token rewards -kl_coef * KL for all tokens of the response without the loss mask. In
agent rollouts the response holds tool output that the policy did not write; its KL is charged to all earlier action tokens."""
import torch

FAMILY = "agents (several turns, tools, observation masks)"
KIND = "advantages"
INPUTS = {
    "rewards": "outcome reward of each trajectory, [rows]",
    "groups": "prompt number of each row, [rows]; this estimator has no group baseline and does not read it",
    "kl": "KL estimate of each response token between the sampling policy and the reference, [rows, time], constant",
    "loss_mask": "1 where the policy wrote the token, 0 on tool output (inside the response) and on padding (at the end), [rows, time]",
}
SETTINGS = {"kl_coef": "weight of the KL penalty in the reward, 0.1", "gamma": "discount per token, 1.0"}
NOTES = ("REINFORCE++ returns before normalisation. Token reward = -kl_coef * KL on tokens that the policy wrote; the outcome reward is added on the last "
         "token of the row that the policy wrote. Tokens of tools and padding are not actions: they carry no reward and no KL penalty. "
         "Return of token t = sum over s >= t of gamma^(s-t) * token reward s, over all positions of the row, tool tokens included as positions; the return at positions that the policy did not write is 0. "
         "Result [rows, time], constant.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    B, T = 4, 12
    mask = torch.ones(B, T)
    mask[0, 3:7] = 0
    mask[1, 2:5] = 0; mask[1, 10:] = 0
    mask[2, 8:] = 0
    mask[3, 4:6] = 0; mask[3, 8:10] = 0
    return {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]), "groups": torch.tensor([0, 0, 1, 1]),
            "kl": torch.rand(B, T, generator=g), "loss_mask": mask}


def _returns(rewards, token_kl, loss_mask, kl_coef, gamma):
    out = torch.zeros_like(token_kl)
    for i in range(len(rewards)):
        r = -kl_coef * token_kl[i]
        last = loss_mask[i].nonzero()[-1, 0]
        r[last] = r[last] + rewards[i]
        run = torch.zeros(())
        for t in reversed(range(r.numel())):
            run = r[t] + gamma * run
            out[i, t] = run
    return out * loss_mask


def broken(rewards, groups, kl, loss_mask, kl_coef=0.1, gamma=1.0):
    end = loss_mask.flip(1).cumsum(1).flip(1) > 0           # padding after the last own token
    return _returns(rewards, kl * end, loss_mask, kl_coef, gamma)


def right(rewards, groups, kl, loss_mask, kl_coef=0.1, gamma=1.0):
    return _returns(rewards, kl * loss_mask, loss_mask, kl_coef, gamma)


if __name__ == "__main__":
    m = make(0)
    a, b = broken(**m), right(**m)
    print("first own token, broken", a[:, 0], "right", b[:, 0])
    assert torch.allclose(b[:, 0], m["rewards"] - 0.1 * (m["kl"] * m["loss_mask"]).sum(1)) and (a - b).abs().max() > 0.05
    assert torch.allclose(a[2], b[2])                       # a row without tools is the same
