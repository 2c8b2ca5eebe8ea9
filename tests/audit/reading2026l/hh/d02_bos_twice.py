"""BOS again after a rendered chat template. baidu-baige/LoongForge#170, https://github.com/baidu-baige/LoongForge/pull/170, 2026.
The chat template renders the BOS itself; the rendered text was then encoded with the tokenizer's default add_special_tokens=True,
which prepends another BOS. The assistant answer was encoded on its own in the same way, so that the trained labels began with a BOS in
the middle of the sequence."""
FAMILY = "data stages, collators and chat templates"
KIND = "chat template"
INPUTS = {"messages": "list of {'role', 'content'}; optional system first, then user/assistant alternating, ends with assistant"}
SETTINGS = {}
NOTES = """(messages) -> ids, mask. One document: ids = encoding of the chat template's text of all messages but the last, with the
generation prompt, followed by the encoding of the last assistant answer and <eot>. The template's text contains the BOS of the document
once, at the very start; no other BOS is anywhere in ids. mask is 1 on the tokens of the last assistant answer and on its <eot>, and 0
elsewhere (earlier assistant turns are context). mask[t] belongs to ids[t] (no shift). The tokenizer is character-level with the special
tokens <bos>, <head>, <eot>; encode(text, add_special_tokens=True) prepends a BOS as Llama-3's tokenizer does."""
SPECIAL = {"<bos>": 0, "<head>": 1, "<eot>": 2}


def encode(text, add_special_tokens=True):
    ids, i = ([0] if add_special_tokens else []), 0
    while i < len(text):
        for s, k in SPECIAL.items():
            if text.startswith(s, i):
                ids.append(k)
                i += len(s)
                break
        else:
            ids.append(3 + ord(text[i]))
            i += 1
    return ids


def apply_chat_template(messages, add_generation_prompt=False):
    text = "<bos>" + "".join(f"<head>{m['role']}\n{m['content']}<eot>" for m in messages)
    return text + ("<head>assistant\n" if add_generation_prompt else "")


def make(seed):
    import random
    r = random.Random(seed)
    w = lambda: "".join(r.choice("klmnop ") for _ in range(r.randint(3, 8)))
    ms = [{"role": "system", "content": w()}]
    for _ in range(r.randint(1, 2)):
        ms += [{"role": "user", "content": w()}, {"role": "assistant", "content": w()}]
    return {"messages": ms}


def broken(messages):
    prompt = encode(apply_chat_template(messages[:-1], add_generation_prompt=True))
    answer = encode(messages[-1]["content"] + "<eot>")
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)


def right(messages):
    prompt = encode(apply_chat_template(messages[:-1], add_generation_prompt=True), add_special_tokens=False)
    answer = encode(messages[-1]["content"] + "<eot>", add_special_tokens=False)
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)


if __name__ == "__main__":
    x = make(0)
    (a, ma), (b, mb) = broken(**x), right(**x)
    print("broken: length", len(a), "BOS at", [i for i, t in enumerate(a) if t == 0], "first trained token", a[ma.index(1)])
    print("right : length", len(b), "BOS at", [i for i, t in enumerate(b) if t == 0], "first trained token", b[mb.index(1)])
    assert a != b and b == encode(apply_chat_template(x["messages"]), False)
