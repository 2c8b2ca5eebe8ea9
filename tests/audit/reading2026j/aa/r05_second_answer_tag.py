"""Search-R1 style exact match on the decoded WHOLE sequence, prompt included: the prompt's own instruction holds one example <answer>..</answer>,
so a text with exactly one tag pair has no answer, and two or more pairs mean that the last one counts (Search-R1, qa_em.extract_solution)."""
FAMILY = "agents"
KIND = "grader"
INPUTS = {"row": "prompt row: 'prompt' (text with exactly one example answer tag) and 'golden' (list of accepted answers)",
          "completion": "decoded text of prompt AND response together, with retrieved passages inside <information> blocks"}
SETTINGS = {}
NOTES = ("Grade 1.0 or 0.0. SQuAD normalisation: lower case, no punctuation, no articles, single spaces; no substring match. Retrieved passages are cut out first, "
         "so a tag in a passage is never an answer. The last tag pair wins, since the agent may revise itself. ValueError if the prompt does not hold exactly one pair. "
         "The text of the prompt is not compared to the beginning of the sequence, as decoding may change blanks.")
import random
import re
import string

TAG = re.compile(r"<answer>(.*?)</answer>", re.S)
INFO = re.compile(r"<information>.*?</information>", re.S)


def _norm(s):
    s = "".join(c for c in s.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())


def right(row, completion):
    if len(TAG.findall(row["prompt"])) != 1:
        raise ValueError("the prompt must hold exactly one example")
    found = TAG.findall(INFO.sub(" ", completion))
    if len(found) <= 1:                       # only the example of the prompt
        return 0.0
    return float(_norm(found[-1]) in {_norm(g) for g in row["golden"]})


PROMPT = "Answer the question. Search with <search>. For example, <answer> Beijing </answer>. Question: %s?\n"


def make(seed):
    r = random.Random(seed)
    city = r.choice(["Beijing", "Oslo", "The Hague", "St. Louis"])
    row = {"prompt": PROMPT % "where is it", "golden": [city]}
    text = row["prompt"] + "<think>hm</think><search>it</search><information>It is <answer>%s</answer></information>" % r.choice(["Rome", city])
    kind = r.randrange(4)
    if kind == 1:
        text += "<answer>%s</answer>" % city.lower().replace("the ", "")
    elif kind == 2:
        text += "<answer>Rome</answer><think>no</think><answer> %s. </answer>" % city
    elif kind == 3:
        text += "<answer>near %s</answer>" % city
    return {"row": row, "completion": text}


if __name__ == "__main__":
    counts = {}
    for seed in range(200):
        c = make(seed)
        own = c["completion"][len(c["row"]["prompt"]):]           # slow twin: cut the prompt, read the response only
        while "<information>" in own:
            a = own.index("<information>")
            own = own[:a] + own[own.index("</information>", a) + len("</information>"):]
        last = own.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in own else None
        want = 0.0 if last is None else float(_norm(last) == _norm(c["row"]["golden"][0]))
        assert right(**c) == want
        counts[want] = counts.get(want, 0) + 1
    # the trap: gold Beijing, no answer given; a reader of the last tag would pay for the prompt's example
    row = {"prompt": PROMPT % "capital", "golden": ["Beijing"]}
    assert right(row, row["prompt"] + "<think>I do not know</think>") == 0.0
    assert right(row, row["prompt"] + "<answer>beijing!</answer>") == 1.0
    print("ok", counts)
