"""Empty think block of the generation prompt is trained. NVIDIA-NeMo/Automodel#3739, https://github.com/NVIDIA-NeMo/Automodel/pull/3739, 2026.
Templates of hybrid reasoning models put an empty <think></think> in every assistant turn without reasoning. These tokens are
part of the generation prompt at inference, the model never writes them. The reasoning mask was found by rendering the
conversation again with the reasoning cleared and comparing; an empty reasoning gives no difference, so both tags were supervised."""
import random

FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "a list of dicts: role (user, assistant or tool), content and, for assistants, reasoning_content (may be empty)"}
SETTINGS = {"mask_reasoning_content": "the reasoning text of assistant turns is not trained, True"}
NOTES = ("Returns token ids and a mask (1 = trained). Trained: what the model itself writes in assistant turns, that is content and <|im_end|>, without the text of the "
         "reasoning; the closing </think> of a real reasoning is written by the model. Not trained: role headers, users, tools, and all that the generation prompt supplies: "
         "'<|im_start|>assistant\\n<think>' when the turn reasons, '<|im_start|>assistant\\n<think></think>' when it does not.")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n", "user", "assistant", "tool"]


def tok(text):
    ids = []
    while text:
        for i, s in enumerate(SPECIAL):
            if text.startswith(s):
                ids.append(i)
                text = text[len(s):]
                break
        else:
            ids.append(len(SPECIAL) + ord(text[0]) % 40)
            text = text[1:]
    return ids


def make(seed):
    r = random.Random(seed)
    word = lambda: "".join(r.choice("abcdefgh") for _ in range(r.randrange(2, 5)))
    messages = [{"role": "user", "content": word()}]
    for reason in ("", word(), ""):
        messages += [{"role": "assistant", "content": word(), "reasoning_content": reason}, {"role": "tool", "content": word()}]
    return {"messages": messages[:-1]}


def header(m):
    return "<|im_start|>" + m["role"] + "\n"


def pieces(m):
    """(text, is it reasoning text, is it supplied by the generation prompt) of one message."""
    if m["role"] != "assistant":
        return [(header(m) + m["content"] + "<|im_end|>\n", None, True)]
    think = m["reasoning_content"]
    return [(header(m), None, True), ("<think>", False, True), (think, True, False), ("</think>", False, not think), (m["content"] + "<|im_end|>", False, False), ("\n", None, True)]


def broken(messages, mask_reasoning_content=True):
    ids, mask = [], []
    for m in messages:
        for text, reasoning, _ in pieces(m):
            t = tok(text)
            trained = reasoning is not None and not (reasoning and mask_reasoning_content)
            ids += t
            mask += [int(trained)] * len(t)
    return ids, mask


def right(messages, mask_reasoning_content=True):
    ids, mask = [], []
    for m in messages:
        for text, reasoning, supplied in pieces(m):
            t = tok(text)
            trained = reasoning is not None and not (reasoning and mask_reasoning_content) and not supplied
            ids += t
            mask += [int(trained)] * len(t)
    return ids, mask


if __name__ == "__main__":
    m = make(0)["messages"]
    (i1, b), (i2, g) = broken(m), right(m)
    assert i1 == i2
    print("trained tokens: broken", sum(b), "right", sum(g), "extra ids", [i1[k] for k in range(len(b)) if b[k] != g[k]])
    assert b != g
