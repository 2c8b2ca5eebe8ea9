"""PoSE (Zhu et al. 2023): to train a long context on short rows, a row is cut into chunks and the chunks' position ids jump by random gaps up to the target length; the tokens stay neighbours, their positions do not.
Positions are not 0..T-1, are not the index, and differ from row to row on purpose."""
import hashlib, random
FAMILY = "packing and positions"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: uid (str, unique), input_ids (list of int)"}
SETTINGS = {"target_len": "context length that is simulated, 64", "chunks": "chunks per row, 2", "epoch": "number of the epoch, 0; changes the random gaps"}
NOTES = ("Adds position_ids to each row; everything else, the order and the number of rows stay. The first position is 0 (the first chunk is not moved), positions rise strictly, the last is < target_len, within a chunk they are consecutive. "
         "Random from (uid, epoch) only: independent of order, batch and rank, repeatable. Rows longer than target_len are refused; rows shorter than `chunks` tokens keep the plain positions. Input rows are not changed in place.")

def make(seed):
    r = random.Random(seed)
    return {"rows": [{"uid": f"d{seed}-{i}", "input_ids": [r.randrange(50) for _ in range(r.choice([1, 2, 8, 12, 16, 64]))]} for i in range(12)]}

def right(rows, target_len=64, chunks=2, epoch=0):
    out = []
    for row in rows:
        n = len(row["input_ids"])
        if n > target_len: raise ValueError(f"{row['uid']}: {n} tokens > {target_len}")
        if n < chunks: out.append({**row, "position_ids": list(range(n))}); continue
        rng = random.Random(int.from_bytes(hashlib.sha256(f"{row['uid']}|{epoch}".encode()).digest()[:8], "big"))
        cuts = [0] + sorted(rng.sample(range(1, n), chunks - 1)) + [n]
        skip, pos = 0, []
        for c, (a, b) in enumerate(zip(cuts, cuts[1:])):
            if c: skip = rng.randint(skip, target_len - n)                 # u_c ~ U(u_{c-1}, L - n), inclusive: never falls
            pos += range(a + skip, b + skip)
        out.append({**row, "position_ids": pos})
    return out

if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows); big = 0
    for r, q in zip(rows, o):
        p = q["position_ids"]; assert q["input_ids"] == r["input_ids"] and len(p) == len(r["input_ids"]) and p[0] == 0 and p[-1] < 64 and "position_ids" not in r
        jumps = [b - a for a, b in zip(p, p[1:])]; assert all(j >= 1 for j in jumps) and sum(j > 1 for j in jumps) <= 1; big = max([big] + jumps)
        if len(p) == 64: assert p == list(range(64))
    rev = right(rows[::-1])[::-1]; assert rev == o and right(rows) == o and right(rows, epoch=1) != o
    # every relative distance below the target can occur
    import collections; seen = collections.Counter()
    for e in range(3000): p = right([{"uid": "x", "input_ids": list(range(8))}], epoch=e)[0]["position_ids"]; seen.update({p[j] - p[i] for i in range(8) for j in range(i)})
    print("largest jump", big, "distances seen", len(seen), "of 63"); assert len(seen) == 63
    # a loss on these positions has a gradient, and rows with plain positions lose nothing
    import torch; torch.manual_seed(0); E, P = torch.randn(50, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True); r = max(o, key=lambda r: max(r["position_ids"]) if len(r["input_ids"]) < 64 else 0)
    h = (E[r["input_ids"]] + P[r["position_ids"]]).cumsum(0); l = torch.nn.functional.cross_entropy(h[:-1] @ E.T, torch.tensor(r["input_ids"][1:])); l.backward(); print("loss", l.item(), "used positions with gradient", int((P.grad.norm(dim=1) > 0).sum())); assert P.grad.norm() > 0
