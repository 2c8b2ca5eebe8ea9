"""Assistant mask by prefix differences: the template is rendered for every prefix of the messages (with generation prompt) and what the assistant turn adds is trained. Tool results are rendered inside a USER turn and several in a row share one turn, so no per-message rendering would be right (Qwen tools template)."""
FAMILY = "chat template agents"; KIND = "chat template"
INPUTS = {"messages": "list of dict role in user, assistant, tool; content"}
SETTINGS = {}
NOTES = "All assistant turns trained including their end mark; tool results, headers and newlines not. Ids are code points. Template is prefix-stable at assistant turns."
def make(seed): return {"messages": [{"role": "user", "content": "q%d" % seed}, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"}, {"role": "assistant", "content": "done"}]}
def render(ms, gen=False):
    s = ""
    for i, m in enumerate(ms):
        if m["role"] == "tool":
            if i == 0 or ms[i - 1]["role"] != "tool": s += "[user\n"
            s += "<r>" + m["content"] + "</r>"
            if i + 1 == len(ms) or ms[i + 1]["role"] != "tool": s += "]\n"
        else: s += "[" + m["role"] + "\n" + m["content"] + "]\n"
    return s + ("[assistant\n" if gen else "")
def right(messages):
    full = render(messages); mask = [0] * len(full)
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            a, b = render(messages[:i], True), render(messages[:i + 1])
            assert full.startswith(b) and b.startswith(a)
            for t in range(len(a), len(b) - 1): mask[t] = 1          # the newline after ] is not generated
    return [ord(c) for c in full], mask
if __name__ == "__main__":
    ids, mask = right(make(0)["messages"]); assert "".join(chr(i) for i, k in zip(ids, mask) if k) == "call]done]"; print(repr("".join(map(chr, ids))))
