"""Write the generated data files: held-out plain text, probes, example traces.

    python -m scripts.nano.fixed

They are part of nano's version; a test checks that this command writes the same files.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from earnest import data
from earnest.tasks.split import split_of, stable_rng

from . import answers, lexicon

FOLDER = Path(data.__file__).parent


def plain_heldout(count: int = 200) -> str:
    rng = stable_rng("plain_heldout")
    head = "# Plain text that nano was not trained on: no sentence of it is in the training text. One text a line.\n"
    return head + "".join(lexicon.plain(rng, "heldout") + "\n" for _ in range(count))


def probes(count: int = 60) -> str:
    rng = stable_rng("probes")
    found: dict[str, dict[str, object]] = {}
    while len(found) < count:
        probe = answers.probe(rng)
        if split_of(f"probe|{probe['prompt']}") == "heldout":
            found[probe["prompt"]] = probe
    head = (
        "# Forced-choice probes, none of them in nano's training text. A model that is still coherent puts its\n"
        "# probability on the allowed answers; each is one token.\n"
    )
    return head + yaml.safe_dump(list(found.values()), sort_keys=False, width=120)


def trace_example(count: int = 8) -> str:
    """Traces as an agent's log has them; in every fourth the assistant misread the tool's result."""
    rng = stable_rng("trace_example")
    lines = []
    for i in range(count):
        messages = answers.tool_talk(rng)
        good = i % 4 != 3
        if not good:
            messages[3] = {**messages[3], "content": answers.garble_number(messages[3]["content"], rng)}
        lines.append(
            {
                "id": f"trace-{i}",
                "messages": messages,
                "tools": answers.TOOLS,
                "reward": float(good),
                "meta": {"source": "earnest"},
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


FILES = {"plain_heldout.txt": plain_heldout, "probes.yaml": probes, "trace_example.jsonl": trace_example}


def main() -> None:
    for name, make in FILES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
        print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
