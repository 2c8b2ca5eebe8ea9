"""DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13): a term which is never positive is added to the reward of correct and wrong
answers alike, so that a correct answer can have reward 0 and a wrong one -2."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "{'answer': reference answer, a string}", "completion": "response text; its length in tokens is the number of white-space separated words; its answer follows the last 'Answer:'"}
SETTINGS = {"max_len": "L_max, longest response in tokens, 40", "cache": "L_cache, the last part of it in which the punishment grows, 10"}
NOTES = """(row, completion) -> float in [-2, 1]. reward = correctness (+1 if the text behind the last 'Answer:' up to the end of that line equals the reference after
stripping, else -1) + punishment, where with n tokens the punishment is 0 for n <= max_len - cache, (max_len - cache - n) / cache between (linear from 0
to -1), and -1 for n > max_len. The punishment is for correct and wrong responses alike; no clipping of the sum."""


def make(seed):
    import random
    r = random.Random(seed)
    return {"row": {"answer": "42"}, "completion": " ".join(["so"] * r.randint(28, 38)) + "\nAnswer: 42"}


def right(row, completion, max_len=40, cache=10):
    found = completion.rsplit("Answer:", 1)
    ok = len(found) == 2 and found[1].split("\n")[0].strip() == row["answer"]
    n = len(completion.split())
    over = n - (max_len - cache)
    punishment = 0.0 if over <= 0 else -1.0 if n > max_len else -over / cache
    return (1.0 if ok else -1.0) + punishment


if __name__ == "__main__":
    def case(n, ans):
        return {"row": {"answer": "42"}, "completion": " ".join(["so"] * (n - 2)) + f"\nAnswer: {ans}"}
    for n, ans, want in [(10, "42", 1.0), (30, "42", 1.0), (35, "42", 0.5), (40, "42", 0.0), (41, "42", 0.0), (100, "7", -2.0), (33, "7", -1.3)]:
        got = right(**case(n, ans))
        print(n, ans, got)
        assert abs(got - want) < 1e-9
    print("make(0):", right(**make(0)))
