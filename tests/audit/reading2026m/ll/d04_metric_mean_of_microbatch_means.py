"""Statistics average the means of micro-batches of different size. huggingface/trl#7012,
https://github.com/huggingface/trl/issues/7012, 2026. PPOTrainer stores one masked mean per micro-batch in a slot and reports the plain
mean over slots and ranks (loss/policy_avg, clipfrac, value loss, entropy, ...). The last micro-batch of a minibatch can be short and the number
of response tokens differs, so the logged number is not the token mean for which it is read."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {
    "per_rank": "list over ranks; each entry is the list of that rank's micro-batches, each a dict with "
                "pg_loss [rows, time] (clipped policy-gradient loss of each token) and mask [rows, time] (1 for a response token); "
                "the last micro-batch of a rank can have fewer rows, and the numbers of response tokens differ",
}
SETTINGS = {}
NOTES = """loss/policy_avg of one minibatch: the per-token policy loss, averaged over all response tokens of all micro-batches of all ranks, every
response token with the same weight. Padding and prompt tokens (mask 0) do not count. The number depends neither on how the rows are cut
into micro-batches nor on how they are spread over the ranks; it equals `single_process` on the concatenated rows. At least one response
token exists in the minibatch; a single micro-batch may have none."""


def make(seed):
    g = torch.Generator().manual_seed(seed)
    per_rank = []
    for rows in ((4, 4, 1), (4, 4, 2)):
        mbs = []
        for n in rows:
            length = torch.randint(2, 12, (n,), generator=g)
            mask = (torch.arange(12)[None] < length[:, None]).float()
            mbs.append({"pg_loss": torch.randn(n, 12, generator=g) * 0.5 + 0.3 - 0.06 * length[:, None], "mask": mask})
        per_rank.append(mbs)
    return {"per_rank": per_rank}


def single_process(pg_loss, mask):
    """Twin: the metric of one process that holds all rows."""
    return float((pg_loss * mask).sum() / mask.sum())


def broken(per_rank):
    slots = []
    for mbs in per_rank:
        stats = torch.zeros(len(mbs))
        for j, mb in enumerate(mbs):
            stats[j] = (mb["pg_loss"] * mb["mask"]).sum() / mb["mask"].sum().clamp(min=1)
        slots.append(stats)
    return torch.cat(slots).mean().item()


def right(per_rank):
    total, count = torch.zeros(()), torch.zeros(())
    for mbs in per_rank:
        total = total + sum((mb["pg_loss"] * mb["mask"]).sum() for mb in mbs)
        count = count + sum(mb["mask"].sum() for mb in mbs)
    return (total / count).item()


if __name__ == "__main__":
    i = make(0)
    flat = [mb for mbs in i["per_rank"] for mb in mbs]
    twin = single_process(torch.cat([m["pg_loss"] for m in flat]), torch.cat([m["mask"] for m in flat]))
    print("broken", broken(**i), "right", right(**i), "twin", twin)
