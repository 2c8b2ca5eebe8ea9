"""Token counts are multiplied by the number of learner ranks. allenai/open-instruct#1808, https://github.com/allenai/open-instruct/pull/1808, 2026.
The data actor hands the same global metrics to every rank (only the batch is sharded), and the training step joined the lengths of all ranks as if each were a shard. Tokens per step, tokens per second
and MFU were N times too high (44 % instead of 11 %)."""
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank {batch: the completions (token lists) of this rank; metrics: {prompt_lengths, response_lengths} of the whole step, the same on all ranks; seconds: time of the step}"}
SETTINGS = {}
NOTES = "Tokens per second of the step: prompt and response tokens of all rows of all ranks over the slowest rank's time."

def make(seed):
    r = random.Random(seed)
    prompts = [r.randint(4, 9) for _ in range(12)]
    responses = [[r.randint(1, 49) for _ in range(r.randint(5, 30))] for _ in range(12)]
    metrics = {"prompt_lengths": prompts, "response_lengths": [len(x) for x in responses]}
    return {"ranks": [{"batch": responses[i::4], "metrics": metrics, "seconds": r.uniform(1, 2)} for i in range(4)]}

def broken(ranks):
    prompt = [n for r in ranks for n in r["metrics"]["prompt_lengths"]]
    response = [n for r in ranks for n in r["metrics"]["response_lengths"]]
    return (sum(prompt) + sum(response)) / max(r["seconds"] for r in ranks)

def right(ranks):
    metrics = ranks[0]["metrics"]
    return (sum(metrics["prompt_lengths"]) + sum(metrics["response_lengths"])) / max(r["seconds"] for r in ranks)

def twin(ranks):
    """Single process: count the completions themselves."""
    tokens = sum(len(x) for r in ranks for x in r["batch"]) + sum(ranks[-1]["metrics"]["prompt_lengths"])
    return tokens / max(r["seconds"] for r in ranks)

if __name__ == "__main__":
    made = make(0)
    print("broken", broken(**made), "right", right(**made), "single process", twin(**made))
    assert abs(right(**made) - twin(**made)) < 1e-9 and abs(broken(**made) / right(**made) - 4) < 1e-9
