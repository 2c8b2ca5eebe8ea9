"""One trajectory becomes one row per assistant turn, with the context that the model saw at that time. Because the running agent drops its old thoughts and elides old tool outputs, no single token sequence contains all turns as sampled; so the history is repeated in many rows and only the last message of a row is trained. Row weights 1/turns keep each trajectory at weight 1 (step-wise training as in verl-agent, AgentGym, Kimi-Researcher-style context management)."""
FAMILY = "agents"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: id, messages (role, content, for assistants also thought)"}
SETTINGS = {"keep_tools": "number of newest tool outputs shown in full, 1"}
NOTES = "More rows come out than go in; contexts are near duplicates on purpose. Weights of one id sum to 1; a trajectory without assistant turns gives no row. Order is kept, input is not changed. The target carries its thought; contexts never do."


def make(seed):
    import random
    r = random.Random(seed)
    rows = []
    for i in range(4):
        ms = [{"role": "user", "content": f"task {r.randint(0, 99)}"}]
        for k in range(r.randint(0, 3) if i else 3):
            ms.append({"role": "assistant", "thought": f"think {i}.{k}", "content": f"call {r.randint(0, 9)}"})
            ms.append({"role": "tool", "content": f"obs {i}.{k} " + "x" * r.randint(1, 9)})
        if i != 3:
            ms.append({"role": "assistant", "thought": f"end {i}", "content": "done"})
        rows.append({"id": i, "messages": ms})
    return {"rows": rows}


def shown(history, keep_tools):
    tools = [j for j, m in enumerate(history) if m["role"] == "tool"]
    full = set(tools[max(0, len(tools) - keep_tools):])
    out = []
    for j, m in enumerate(history):
        content = "[omitted]" if m["role"] == "tool" and j not in full else m["content"]
        out.append({"role": m["role"], "content": content})
    return out


def right(rows, keep_tools=1):
    out = []
    for row in rows:
        ms = row["messages"]
        turns = [j for j, m in enumerate(ms) if m["role"] == "assistant"]
        for n, j in enumerate(turns):
            out.append({"id": row["id"], "turn": n, "context": shown(ms[:j], keep_tools),
                        "target": "<think>" + ms[j]["thought"] + "</think>" + ms[j]["content"], "weight": 1.0 / len(turns)})
    return out


if __name__ == "__main__":
    import copy
    b = make(0)
    before = copy.deepcopy(b)
    out = right(**b)
    assert b == before
    for row in b["rows"]:
        mine = [o for o in out if o["id"] == row["id"]]
        n = sum(m["role"] == "assistant" for m in row["messages"])
        assert len(mine) == n and (n == 0 or abs(sum(o["weight"] for o in mine) - 1) < 1e-9)
        for o in mine:
            assert all("think" not in m["content"] for m in o["context"])
            tools = [m["content"] for m in o["context"] if m["role"] == "tool"]
            assert all(t == "[omitted]" for t in tools[:-1]) and (not tools or tools[-1].startswith("obs"))
    print(len(b["rows"]), "rows in,", len(out), "rows out; last of the first:", [o for o in out if o["id"] == 0][-1])
