"""First-fit-decreasing packing whose attention_mask is not 0/1: its values 1, 2, 3 … are the number of the sample inside the bin, 0 is padding (axolotl's multipack, whose patched attention reads the cumulative lengths out of the mask). Samples are reordered by length, and the number of output rows depends on the lengths."""
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts: input_ids (list), labels (list)"}
SETTINGS = {"bin_len": "length of a bin, 16 tokens"}
NOTES = "attention_mask: integer sample numbers. Number of rows out <= rows in. Samples longer than bin_len raise. The first label of a sample is set to -100, padding has label -100, id 0. position_ids restart per sample. Ties in length keep their order."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in torch.randint(2, 13, (9,), generator=g).tolist():
        ids = torch.randint(1, 32, (n,), generator=g).tolist()
        rows.append({"input_ids": ids, "labels": list(ids)})
    return {"rows": rows}


def right(rows, bin_len=16):
    bins = []
    for r in sorted(rows, key=lambda r: -len(r["input_ids"])):
        n = len(r["input_ids"])
        if n > bin_len:
            raise ValueError("sample longer than the bin")
        for b in bins:
            if sum(len(x["input_ids"]) for x in b) + n <= bin_len:
                b.append(r)
                break
        else:
            bins.append([r])
    out = {"input_ids": torch.zeros(len(bins), bin_len, dtype=torch.long), "labels": torch.full((len(bins), bin_len), -100),
           "attention_mask": torch.zeros(len(bins), bin_len, dtype=torch.long), "position_ids": torch.zeros(len(bins), bin_len, dtype=torch.long)}
    for i, b in enumerate(bins):
        s = 0
        for k, r in enumerate(b, 1):
            e = s + len(r["input_ids"])
            out["input_ids"][i, s:e] = torch.tensor(r["input_ids"])
            out["labels"][i, s + 1:e] = torch.tensor(r["labels"][1:], dtype=torch.long)
            out["attention_mask"][i, s:e] = k
            out["position_ids"][i, s:e] = torch.arange(e - s)
            s = e
    return out


if __name__ == "__main__":
    b = make(0)
    out = right(**b)
    found = []
    for i in range(len(out["input_ids"])):
        for k in range(1, int(out["attention_mask"][i].max()) + 1):
            at = out["attention_mask"][i] == k
            found.append(out["input_ids"][i][at].tolist())
            assert out["labels"][i][at].tolist() == [-100] + found[-1][1:]
            assert out["position_ids"][i][at].tolist() == list(range(len(found[-1])))
    assert sorted(found) == sorted(r["input_ids"] for r in b["rows"])
    print(out["attention_mask"])
    print("bins", len(out["input_ids"]), "fill", (out["attention_mask"] > 0).float().mean().item())
