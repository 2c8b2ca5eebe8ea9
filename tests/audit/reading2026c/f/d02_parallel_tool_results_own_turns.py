"""Each tool result is rendered as its own user turn. THUDM/slime#2263, https://github.com/THUDM/slime/issues/2263, 2026.
The SFT loss-mask generator rendered the messages one by one. The template puts consecutive tool messages into one user turn, but alone
each of them gets its own <|im_start|>user ... <|im_end|>, so training sees turn boundaries that never occur at inference."""
import re
import zlib

FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of {role, content}; roles system, user, assistant, tool; results of parallel calls are consecutive tool messages"}
SETTINGS = {}
NOTES = ("Returns ids and mask; mask is 1 on the assistant's words and its <|im_end|>, not on the header. The ids must be those of "
         "template(messages) on the whole conversation, which is what the server uses at inference.")

SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2, "<tool_response>": 3, "</tool_response>": 4, "\n": 5}

def tokenize(text):
    pieces = re.findall(r"<\|im_start\|>|<\|im_end\|>|</?tool_response>|\n|[^\s<]+", text)
    return [SPECIAL.get(p) or 10 + zlib.crc32(p.encode()) % 990 for p in pieces]

def template(messages):
    text = ""
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                text += "<|im_start|>user"
            text += "\n<tool_response>\n" + m["content"] + "\n</tool_response>"
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                text += "<|im_end|>\n"
        else:
            text += "<|im_start|>" + m["role"] + "\n" + m["content"] + "<|im_end|>\n"
    return text

def make(seed):
    words = "red blue green seven file open read cat sum list".split()
    say = lambda i: " ".join(words[(seed + i * 3 + j) % len(words)] for j in range(3))
    return {"messages": [{"role": "system", "content": say(0)}, {"role": "user", "content": say(1)},
                         {"role": "assistant", "content": "call a call b"},
                         {"role": "tool", "content": say(2)}, {"role": "tool", "content": say(3)},
                         {"role": "assistant", "content": say(4)}, {"role": "user", "content": say(5)},
                         {"role": "assistant", "content": say(6)}]}

def mark(ids, role):
    if role != "assistant":
        return [0] * len(ids)
    header, tail = 3, 1  # <|im_start|> assistant \n ... <|im_end|> [\n]
    return [0] * header + [1] * (len(ids) - header - tail) + [0] * tail

def broken(messages):
    ids, mask = [], []
    for m in messages:
        part = tokenize(template([m]))
        ids += part
        mask += mark(part, m["role"])
    return ids, mask

def right(messages):
    ids, mask, start = [], [], 0
    while start < len(messages):
        end = start + 1
        while messages[start]["role"] == "tool" and end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        part = tokenize(template(messages[start:end]))
        ids += part
        mask += mark(part, messages[start]["role"])
        start = end
    return ids, mask

if __name__ == "__main__":
    made = make(0)
    whole = tokenize(template(made["messages"]))
    (a, am), (b, bm) = broken(**made), right(**made)
    print("tokens: whole template", len(whole), "broken", len(a), "right", len(b), "trained", sum(am), sum(bm))
    assert b == whole and a != whole and len(b) == len(bm) and sum(am) == sum(bm)
