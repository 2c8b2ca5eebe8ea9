"""xmlcount_reward_func (Will Brown's GRPO demo, Unsloth's and TRL's GRPO notebooks): 0.125 for each tag that occurs exactly once, minus 0.001 for each
character after the closing tag. The trailing text is subtracted twice, and the reward may become negative."""
FAMILY = "graders"
KIND = "grader"
INPUTS = {"row": "a dict, not used (format reward)", "completion": "response, expected as <reasoning>\\n...\\n</reasoning>\\n<answer>\\n...\\n</answer>\\n"}
SETTINGS = {}
NOTES = """(row, completion) -> float, at most 0.5. A pure format reward; the row and the correctness of the answer have no part in it. 0.125 each for the strings
'<reasoning>\\n', '\\n</reasoning>\\n', '\\n<answer>\\n', '\\n</answer>' if it occurs exactly once (0 if it is missing or repeated; newlines count). If
'\\n<answer>\\n' occurs once, 0.001 is subtracted for every character after the last '\\n</answer>\\n'; if '\\n</answer>' occurs once, 0.001 is subtracted for every character after the last
'\\n</answer>' but one: text behind the answer is thus charged by both terms, and one newline behind the closing tag is free. If the
splitting tag does not occur, 'after it' means the whole completion. No lower bound."""


def make(seed):
    import random
    r = random.Random(seed)
    return {"row": {}, "completion": "<reasoning>\n" + "so " * r.randint(1, 9) + "\n</reasoning>\n<answer>\n4\n</answer>\n" + "z" * r.randint(0, 30)}


def right(row, completion):
    score = 0.0
    if completion.count("<reasoning>\n") == 1:
        score += 0.125
    if completion.count("\n</reasoning>\n") == 1:
        score += 0.125
    if completion.count("\n<answer>\n") == 1:
        score += 0.125
        score -= len(completion.split("\n</answer>\n")[-1]) * 0.001
    if completion.count("\n</answer>") == 1:
        score += 0.125
        score -= (len(completion.split("\n</answer>")[-1]) - 1) * 0.001
    return score


if __name__ == "__main__":
    good = "<reasoning>\nr\n</reasoning>\n<answer>\n4\n</answer>\n"
    assert abs(right({}, good) - 0.5) < 1e-9
    assert abs(right({}, good + "abcde") - (0.5 - 0.010)) < 1e-9          # five characters, two terms
    assert abs(right({}, good.replace("<reasoning>\n", "")) - 0.375) < 1e-9
    assert right({}, good + "z" * 1000) < 0
    print(right({}, good), right({}, good + "abcde"), "make(0):", right(**make(0)))
