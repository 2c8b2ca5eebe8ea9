"""Turn discount runs over insertion order, across unrelated branches. areal-project/AReaL#1666, https://github.com/areal-project/AReaL/pull/1666, 2026.
apply_reward_discount walked the cache of interactions backwards in insertion order and carried the discounted reward
along. With forks (retries, best-of-n, sub-agents) neighbours in the cache are not parent and child, so a reward
reached turns of other branches. Single chains are right."""
import torch
FAMILY = "agents"
KIND = "advantages"
INPUTS = {"rewards": "raw reward of each interaction (model call), in the order in which they were cached, [interactions]",
          "groups": "number of the session each interaction belongs to, [interactions]",
          "parents": "index of the parent interaction (the call whose history this one extends), -1 for a root, [interactions]"}
SETTINGS = {"turn_discount": "discount per turn, 0.9"}
NOTES = ("Return of an interaction = own reward + turn_discount * mean of the returns of its children. Parents come before children. "
         "Returns a float tensor, one value per interaction; no normalization. On a chain this is the usual discounted return.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1, 0, 0, 1, 2, 3, -1, 6, 7, 6])
    groups = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    rewards = torch.zeros(10)
    leaves = [4, 5, 8, 9]
    rewards[leaves] = torch.tensor([1.0, 0.0, 0.0, 1.0])[torch.randperm(4, generator=g)] + 0.1 * torch.rand(4, generator=g)
    return {"rewards": rewards, "groups": groups, "parents": parents}

def broken(rewards, groups, parents, turn_discount=0.9):
    out = rewards.clone().float()
    carry, session = 0.0, None
    for i in range(len(out) - 1, -1, -1):
        if groups[i].item() != session:
            carry, session = 0.0, groups[i].item()
        carry = carry * turn_discount + out[i].item()
        out[i] = carry
    return out

def right(rewards, groups, parents, turn_discount=0.9):
    out = rewards.clone().float()
    for i in range(len(out) - 1, -1, -1):
        children = (parents == i).nonzero().flatten()
        if len(children):
            out[i] = out[i] + turn_discount * out[children].mean()
    return out

if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d).tolist()); print("right ", right(**d).tolist())
    assert not torch.allclose(broken(**d), right(**d))
    chain = {"rewards": torch.rand(5), "groups": torch.zeros(5), "parents": torch.arange(-1, 4)}
    assert torch.allclose(broken(**chain), right(**chain))
