"""The KL baseline of KTO is that of the last micro-batch. PKU-Alignment/align-anything#216,
https://github.com/PKU-Alignment/align-anything/pull/216 (issue 215), 2026. compute_kl loops over batches of mismatched
prompt-response pairs and assigns self.kl inside the loop, so only the last batch survives; the loss then measures
rewards against a noisy value that depends on the order of the batches. The fix sums the clamped KL of each batch and
divides by the number of batches."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over micro-batches of dicts: policy_logps and ref_logps, [pairs], summed log-probs of mismatched responses"}
SETTINGS = {}
NOTES = ("KL estimate used as a constant by the loss: mean over micro-batches of max(0, mean over pairs of policy - ref). The "
         "entries are micro-batches, not ranks; all have the same number of pairs. The value does not depend on their order.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(5):
        ref = -20 + 3 * torch.randn(4, generator=g)
        out.append({"policy_logps": ref + torch.randn(4, generator=g) + 0.8, "ref_logps": ref})
    return {"ranks": out}


def broken(ranks):
    for batch in ranks:
        kl = (batch["policy_logps"] - batch["ref_logps"]).mean()
        result = max(kl.item(), 0.0)
    return result


def right(ranks):
    total = 0.0
    for batch in ranks:
        kl = (batch["policy_logps"] - batch["ref_logps"]).mean()
        total += max(kl.item(), 0.0)
    return total / len(ranks)


if __name__ == "__main__":
    print(broken(**make(0)), right(**make(0)), "reversed", broken(make(0)["ranks"][::-1]), right(make(0)["ranks"][::-1]))
    assert abs(broken(**make(0)) - right(**make(0))) > 1e-3
