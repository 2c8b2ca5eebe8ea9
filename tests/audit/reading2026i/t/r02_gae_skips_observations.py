"""GAE over the model's tokens only; tool output is jumped over. As in radixark/miles (PR 1827): the recursion runs on the compressed sequence of trained tokens.
Observation tokens are no actions: they take no reward, no value delta and no gamma*lambda decay. The next value of the last token of a turn is the value at the first token of the next turn, past the tool output. Advantages at observation tokens are zero, and a reward that lies on a masked final position is moved to the last trained token."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "scalar reward of each trajectory, [rows]", "groups": "not used by this estimator (prompt number of each row), [rows]",
          "values": "critic values at each token, [rows, time]", "loss_mask": "1 at tokens that the model wrote, 0 at prompt, tool output and padding, [rows, time]"}
SETTINGS = {"gamma": "discount, 0.99", "lam": "GAE lambda, 0.95"}
NOTES = "The reward belongs to the last trained token. values are constants. Output [rows, time], 0 outside loss_mask; no whitening. Terminal state has value 0. Each row has at least one trained token."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0, 0]]).float()
    return {"rewards": torch.rand(3, generator=g), "groups": torch.tensor([0, 0, 1]), "values": torch.randn(3, 10, generator=g), "loss_mask": mask}

def right(rewards, groups, values, loss_mask, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(values)
    carry = torch.zeros(len(values)); nxt = torch.zeros(len(values)); seen = torch.zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        on = loss_mask[:, t]
        r = rewards * on * (1 - seen)              # first trained token from the right takes the reward
        delta = r + gamma * nxt - values[:, t]
        new = delta + gamma * lam * carry
        carry = torch.where(on.bool(), new, carry)  # carried unchanged over observations
        nxt = torch.where(on.bool(), values[:, t], nxt)
        seen = torch.maximum(seen, on)
        adv[:, t] = carry * on
    return adv

if __name__ == "__main__":
    d = make(0); out = right(**d)
    for b in range(3):
        idx = d["loss_mask"][b].nonzero().flatten().tolist(); v = d["values"][b, idx].tolist() + [0.0]; g = 0.0
        for k in range(len(idx) - 1, -1, -1):
            delta = (d["rewards"][b].item() if k == len(idx) - 1 else 0.0) + 0.99 * v[k + 1] - v[k]
            g = delta + 0.99 * 0.95 * g
            assert abs(out[b, idx[k]].item() - g) < 1e-5
    assert (out[d["loss_mask"] == 0] == 0).all()
    print("advantages equal those of the compressed sequences", out[0].tolist())
