"""Group normalisation becomes batch normalisation when groups are uneven. THUDM/slime#1414,
https://github.com/THUDM/slime/issues/1414, 2026 (also THUDM/slime#2230, 2026).
If the number of rewards is not n_samples_per_prompt * rollout_batch_size (aborted or fan-out samples), the code falls
back to rewards.view(-1, N), which is one row with all samples. Mean and deviation are then those of the whole batch, and
a prompt whose samples all have the same reward gets a non-zero advantage."""
import torch

FAMILY = "losses"
KIND = "advantages"
INPUTS = {"rewards": "one reward per sample, [samples]", "groups": "index of the prompt of each sample, [samples], "
          "sorted; prompts may have different numbers of samples"}
SETTINGS = {"n_samples_per_prompt": "planned samples per prompt, 4", "rollout_batch_size": "planned prompts, 4"}
NOTES = ("GRPO: reward minus the mean of its group, divided by the group's (Bessel-corrected) deviation plus 1e-6. A group "
         "with equal rewards, or of one sample, gets zeros. No gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    sizes = [4, 3, 4, 2]
    groups = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    rewards = torch.randint(0, 2, (len(groups),), generator=g).float() + 0.5 * groups
    return {"rewards": rewards, "groups": groups}


def broken(rewards, groups, n_samples_per_prompt=4, rollout_batch_size=4):
    if rewards.shape[-1] == n_samples_per_prompt * rollout_batch_size:
        r = rewards.reshape(-1, n_samples_per_prompt)
    else:
        r = rewards.view(-1, rewards.shape[-1])
    r = r - r.mean(dim=-1, keepdim=True)
    r = r / (r.std(dim=-1, keepdim=True) + 1e-6)
    return r.flatten()


def right(rewards, groups, n_samples_per_prompt=4, rollout_batch_size=4):
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        i = groups == g
        r = rewards[i] - rewards[i].mean()
        out[i] = r / (r.std() + 1e-6) if len(r) > 1 else 0.0
    return out


if __name__ == "__main__":
    c = make(0)
    print("rewards", c["rewards"].tolist())
    print("broken", [round(x, 3) for x in broken(**c).tolist()])
    print("right ", [round(x, 3) for x in right(**c).tolist()])
    assert (broken(**c) - right(**c)).abs().max() > 0.1
    even = {"rewards": torch.rand(16), "groups": torch.arange(4).repeat_interleave(4)}
    assert torch.allclose(broken(**even), right(**even), atol=1e-5)
