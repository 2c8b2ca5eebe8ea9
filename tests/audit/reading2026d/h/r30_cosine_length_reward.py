"""Cosine length reward: right answers lose reward with length, WRONG answers gain (less negative) so that the model thinks longer when it is wrong; at the limit a fixed penalty applies (Yeo et al. 2025, 'Demystifying long CoT')."""
FAMILY = "grader"; KIND = "grader"
INPUTS = {"row": "dict answer", "completion": "list of words; the last is the answer"}
SETTINGS = {"limit": "maximal length, 20", "values": "correct 2 to 1, wrong -10 to 0, exceeding -10"}
NOTES = "Not monotone in correctness times brevity on purpose: wrong and long beats wrong and short. Length at or above the limit gives -10 even if right."
import math
def make(seed): return {"row": {"answer": "4"}, "completion": ["w"] * (seed % 18) + ["4"]}
def right(row, completion, limit=20):
    n = len(completion)
    if n >= limit: return -10.0
    ok = n > 0 and completion[-1] == row["answer"]
    a, b = (2.0, 1.0) if ok else (-10.0, 0.0)           # value at length 0, at the limit
    return b + 0.5 * (a - b) * (1 + math.cos(math.pi * n / limit))
if __name__ == "__main__":
    g = [right({"answer": "4"}, ["w"] * (n - 1) + ["4"]) for n in range(1, 21)]; w = [right({"answer": "4"}, ["w"] * n) for n in range(1, 20)]
    assert all(a > b for a, b in zip(g, g[1:])) and all(a < b for a, b in zip(w, w[1:])) and min(g[:-1]) > max(w) and abs(g[9] - 1.5) < 1e-12 and g[-1] == -10; print(g[0], g[18], w[0], w[-1])
