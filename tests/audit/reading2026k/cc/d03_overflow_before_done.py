"""Context overflow is checked before the episode is known to be over. thinking-machines-lab/tinker-cookbook#506,
https://github.com/thinking-machines-lab/tinker-cookbook/pull/506, 2026. When the model gave its final answer, the overflow
check still ran on the rendered conversation, although no further sampling call would follow. If conversation plus the room for
one more answer was longer than the limit, the real reward of the finished episode was replaced by the overflow reward
(problem P4 of the pull request): correct answers of long episodes got 0."""
FAMILY = "agents"
KIND = "grader"
INPUTS = {"row": "dict with answer (a word) and prompt_tokens (length of the first observation)",
          "completion": "list of turns; a turn is a dict with text (what the model wrote; 'ANSWER: word' ends the episode), action_tokens and observation_tokens (length of the tool result that follows; 0 behind the last turn)"}
SETTINGS = {"max_context": "limit of the conversation in tokens, 100", "max_generation": "room that must be free before another turn is sampled, 20",
            "overflow_reward": "reward of an episode that has no room for another turn, -0.5"}
NOTES = ("The reward of an episode. An episode that has given its final answer is graded by the answer: 1.0 if the word behind 'ANSWER:' of its last turn is the answer, "
         "else 0.0, however long the conversation has become. Only an episode that would need another turn and has no room for it (conversation + max_generation > max_context) gets overflow_reward. "
         "An episode that runs out of turns without an answer and without overflow gets 0.0. No trained parameters.")
import random


def make(seed):
    r = random.Random(seed)
    words = ["red", "blue", "green"]
    answer = r.choice(words)
    turns = [{"text": "call search", "action_tokens": r.randint(5, 15), "observation_tokens": r.randint(5, 15)} for _ in range(r.randint(1, 2))]
    used = 10 + sum(t["action_tokens"] + t["observation_tokens"] for t in turns)
    # the last turn fits (used + 20 <= 100), but leaves no room for another one
    turns.append({"text": "ANSWER: " + (answer if r.random() < 0.8 else r.choice(words)), "action_tokens": r.randint(12, 20), "observation_tokens": 0})
    return {"row": {"answer": answer, "prompt_tokens": 10 + max(0, 80 - used) - r.randint(0, 3) * (used < 77)}, "completion": turns}


def final_answer(text):
    return text.split("ANSWER:")[1].strip() if "ANSWER:" in text else None


def broken(row, completion, max_context=100, max_generation=20, overflow_reward=-0.5):
    length = row["prompt_tokens"]
    for turn in completion:
        length += turn["action_tokens"] + turn["observation_tokens"]
        said = final_answer(turn["text"])
        if length + max_generation > max_context:
            return overflow_reward
        if said is not None:
            return 1.0 if said == row["answer"] else 0.0
    return 0.0


def right(row, completion, max_context=100, max_generation=20, overflow_reward=-0.5):
    length = row["prompt_tokens"]
    for turn in completion:
        length += turn["action_tokens"] + turn["observation_tokens"]
        said = final_answer(turn["text"])
        if said is not None:
            return 1.0 if said == row["answer"] else 0.0
        if length + max_generation > max_context:
            return overflow_reward
    return 0.0


if __name__ == "__main__":
    x = make(0)
    print(x)
    print("broken", broken(**x), "right", right(**x))
    assert broken(**x) != right(**x)
    for s in range(50):
        y = make(s)
        n = y["row"]["prompt_tokens"]
        for t in y["completion"]:
            assert n + 20 <= 100, (s, n)
            n += t["action_tokens"] + t["observation_tokens"]
