"""A sample popped from the overflow buffer is dropped when the pack is flushed. ByteDance-Seed/Bagel#308,
https://github.com/ByteDance-Seed/Bagel/pull/308, 2026.
The packed dataset prefers samples of its overflow buffer while the current pack is short. If the popped sample does not fit, the pack is
yielded and the state reset, but the sample was already removed from the buffer and only new samples are put there: it never appears in a
batch. With lengths 6, 6, 3, 6 and 10 tokens per pack, packs (a), (c, d) come out instead of (a), (b, c), (d)."""
FAMILY = "packing and positions"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': int, 'ids': list of token ids}, each at most max_num_tokens long"}
SETTINGS = {"max_num_tokens": "hard limit of tokens per pack, 10", "expected_num_tokens": "a pack of at least so many tokens is emitted at once, 9",
            "prefer_buffer_before": "below so many tokens the buffer is asked before the source, 8", "max_buffer_size": "samples in the overflow buffer, 4"}
NOTES = """(rows) -> packs, each {'ids': concatenated token ids, 'sample_ids': ids of its rows, 'lengths': lengths of its rows}. Greedy packing with an
overflow buffer: a new sample that does not fit into the current pack goes to the buffer (if it has room; else the pack is emitted and the
sample opens the next one); while the pack is shorter than prefer_buffer_before, samples of the buffer (first in, first out) come before new
ones; if a sample of the buffer does not fit, the pack is emitted and the sample goes to the next pack. At the end of the source the buffer is
emptied. Every row appears whole in exactly one pack, no pack exceeds max_num_tokens, tokens within a row keep their order. Order of the rows
is not kept."""


def make(seed):
    import random
    r = random.Random(seed)
    lens = [6, 6, 3, 6] + [r.randint(2, 8) for _ in range(12)]
    return {"rows": [{"id": i, "ids": [r.randint(3, 40) for _ in range(n)]} for i, n in enumerate(lens)]}


def _pack(rows, max_num_tokens, expected_num_tokens, prefer_buffer_before, max_buffer_size, give_back):
    packs, cur, buffer, source = [], [], [], list(rows)
    size = lambda: sum(len(r["ids"]) for r in cur)

    def flush():
        packs.append({"ids": [t for r in cur for t in r["ids"]], "sample_ids": [r["id"] for r in cur], "lengths": [len(r["ids"]) for r in cur]})
        cur.clear()

    while source or buffer:
        from_buffer = bool(buffer) and (size() < prefer_buffer_before or not source)
        row = buffer.pop(0) if from_buffer else source.pop(0)
        if size() + len(row["ids"]) > max_num_tokens:
            if not from_buffer and len(buffer) < max_buffer_size:
                buffer.append(row)
                continue
            flush()
            if from_buffer:
                if give_back:
                    buffer.insert(0, row)
                continue
        cur.append(row)
        if size() >= expected_num_tokens:
            flush()
    if cur:
        flush()
    return packs


def broken(rows, max_num_tokens=10, expected_num_tokens=9, prefer_buffer_before=8, max_buffer_size=4):
    return _pack(rows, max_num_tokens, expected_num_tokens, prefer_buffer_before, max_buffer_size, give_back=False)


def right(rows, max_num_tokens=10, expected_num_tokens=9, prefer_buffer_before=8, max_buffer_size=4):
    return _pack(rows, max_num_tokens, expected_num_tokens, prefer_buffer_before, max_buffer_size, give_back=True)


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    ia, ib = [p["sample_ids"] for p in a], [p["sample_ids"] for p in b]
    print("broken", ia, "rows", sum(map(len, ia)))
    print("right ", ib, "rows", sum(map(len, ib)))
    assert sorted(sum(ib, [])) == list(range(16)) and max(sum(p["lengths"]) for p in b) <= 10 and len(sum(ia, [])) < 16
    assert [p["sample_ids"] for p in right(x["rows"][:4])] == [[0], [1, 2], [3]]
