"""Tokens of a tool turn by rendering a dummy conversation and cutting off its prefix. As in verl's agent loop and multi-turn SFT data sets (fixed base conversation).
To add messages to a running trajectory without rendering the sampled tokens again, the template is applied to [dummy system, dummy user] with and without the new messages; what the longer render adds is the delta. The dummy texts never reach the ids. The model's sampled ids are kept as they are, even where the template would tokenize the same text in another way."""
FAMILY = "agents"
KIND = "chat template"
INPUTS = {"messages": "list of messages; assistant messages carry the sampled ids ('ids', ending with the end-of-turn token), others have 'content'"}
SETTINGS = {}
NOTES = ("Returns ids and a 0/1 mask. Mask is 1 exactly at the sampled ids of all assistant turns including their end-of-turn token; headers and newlines that the template writes are 0. "
         "The template adds a default system message if there is none, which is why the base has one. Ids: 1 start, 2 end of turn, 3 newline, 4..7 roles, characters from 10 on; ids from 200 on are merged tokens that only the sampler makes.")
START, END, NL = 1, 2, 3
ROLE = {"system": 4, "user": 5, "assistant": 6, "tool": 7}

def make(seed):
    q = ["sum 2 3", "sum 4 5", "sum 9 1"][seed % 3]
    call, ans = [200, 201, ord("a") - 22, END], [202, ord("5") - 22, END]
    return {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": q}, {"role": "assistant", "ids": call}, {"role": "tool", "content": "5"},
                         {"role": "assistant", "ids": ans}, {"role": "user", "content": "and 1 1"}, {"role": "assistant", "ids": [203, END]}]}

def template(messages, generation_prompt=False):
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "default"}] + messages
    ids = []
    for m in messages:
        ids += [START, ROLE[m["role"]], NL] + [ord(c) - 22 for c in m["content"]] + [END, NL]
    return ids + ([START, ROLE["assistant"], NL] if generation_prompt else [])
BASE = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]

def right(messages):
    k = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = template(messages[:k], generation_prompt=True)
    mask = [0] * len(ids)
    base = len(template(BASE))
    while k < len(messages):
        ids += messages[k]["ids"]; mask += [1] * len(messages[k]["ids"])
        new = []
        k += 1
        while k < len(messages) and messages[k]["role"] != "assistant":
            new.append(messages[k]); k += 1
        if not new:
            break
        delta = [NL] + template(BASE + new, generation_prompt=True)[base:]   # the newline after the sampled end of turn
        ids += delta; mask += [0] * len(delta)
    return ids, mask

if __name__ == "__main__":
    ms = make(0)["messages"]; ids, mask = right(ms)
    ref, rm = [], []
    for m in ms:
        head = [START, ROLE[m["role"]], NL]
        if m["role"] == "assistant":
            ref += head + m["ids"] + [NL]; rm += [0] * 3 + [1] * len(m["ids"]) + [0]
        else:
            body = [ord(c) - 22 for c in m["content"]] + [END, NL]; ref += head + body; rm += [0] * (3 + len(body))
    ref, rm = ref[:-1], rm[:-1]
    print(ids == ref, mask == rm, "trained", sum(mask))
    assert ids == ref and mask == rm
