"""Replay buffer is flagged as full too early. assume-framework/assume#855,
https://github.com/assume-framework/assume/pull/855, 2026. The write position is advanced before the check whether the next block
still fits, and the check then sets 'full' and returns to slot 0. Slots at the end were never written, but sampling now ranges over
the whole capacity and draws their initial zeros as transitions."""
import random

FAMILY = "replay and off-policy corrections"
KIND = "data stage"
INPUTS = {"rows": "transitions in the order in which they arrive; each a dict: 'id' (from 1), 'obs' (list of 3 floats), 'action' (float), 'reward' (float)"}
SETTINGS = {"capacity": "slots of the ring buffer, 10", "block": "transitions that one write adds (one per learning unit), 4; the capacity need not be a multiple of it"}
NOTES = ("Writes the arriving transitions block by block into a ring buffer of preallocated slots and returns, slot by slot, the rows from which the learner draws its minibatches uniformly. "
         "Until the buffer is full these are the slots written so far; afterwards all slots. A block that passes the end is continued at slot 0 (wrap-around) and overwrites the oldest. "
         "So the result always holds the newest min(capacity, number of arrived) transitions, each once, and nothing else; the order is that of the slots.")


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": i + 1, "obs": [rng.gauss(0, 1) for _ in range(3)], "action": rng.uniform(-1, 1), "reward": rng.gauss(0, 1)} for i in range(8)]}


def _empty():
    return {"id": 0, "obs": [0.0, 0.0, 0.0], "action": 0.0, "reward": 0.0}


def broken(rows, capacity=10, block=4):
    slots, pos, full = [_empty() for _ in range(capacity)], 0, False
    for s in range(0, len(rows), block):
        part = rows[s:s + block]
        slots[pos:pos + len(part)] = [dict(r) for r in part]
        pos += len(part)
        if pos + len(part) >= capacity:
            full, pos = True, 0
    return slots if full else slots[:pos]


def right(rows, capacity=10, block=4):
    slots, pos, full = [_empty() for _ in range(capacity)], 0, False
    for s in range(0, len(rows), block):
        for r in rows[s:s + block]:
            slots[pos] = dict(r)
            pos += 1
            if pos == capacity:
                full, pos = True, 0
    return slots if full else slots[:pos]


if __name__ == "__main__":
    m = make(0)
    print("broken", [r["id"] for r in broken(**m)], "right", [r["id"] for r in right(**m)])
    assert [r["id"] for r in right(**m)] == list(range(1, 9)) and [r["id"] for r in broken(**m)] != list(range(1, 9))
    more = make(0)["rows"] * 3
    more = [dict(r, id=i + 1) for i, r in enumerate(more)]
    assert sorted(r["id"] for r in right(more)) == list(range(15, 25))
