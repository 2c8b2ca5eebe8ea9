"""The API against its own schema: whatever is sent, no server error, and only answers that the schema announces.

Half of the requests are aimed: their ids name things that exist, so that they get past the first 404.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.conftest import Live

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = max(1, settings().max_examples // 5)  # of each operation: 8 in CI, 200 in the nightly profile
NAME = "fuzzed/one"
LAST = ("DELETE",)  # what they are aimed at is gone afterwards


@pytest.fixture(scope="module")
def schema(live: Live):
    live.state.wait()
    found = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    return found.include(path_regex="^/(v1|health)").exclude(path="/v1/events")


@pytest.fixture(scope="module")
def known(live: Live) -> dict[str, Any]:
    """What names in a request may mean: an adapter with two versions, an answer, a feedback."""
    live.post("/v1/adapters", {"name": NAME, "learn": {"updates": 1}}, 201)
    chat = live.chat(NAME)
    given = live.learned(live.teach(chat, text="Too cold."))
    live.learned(live.teach(chat, thumbs="up"))
    return {
        **dict.fromkeys(("name", "adapter", "lora_name"), NAME),
        **dict.fromkeys(("model", "model_id"), f"{NAME}@1"),
        **dict.fromkeys(("number", "new", "version"), 1),
        "old": 2,
        "completion_id": chat["id"],
        "feedback_id": given["id"],
        "choice": 0,
    }


def _aim(case: Any, known: dict[str, Any]) -> bool:
    """Replace the names in a request by existing ones; whether there were any."""
    hit = False
    for place in (case.path_parameters, case.query, case.body):
        if isinstance(place, dict):
            for key in set(place) & set(known):
                place[key], hit = known[key], True
    return hit


def _fuzz(operation: Any, known: dict[str, Any]) -> set[int]:
    codes: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        aimed = data.draw(st.booleans()) and _aim(case, known)
        if isinstance(case.body, dict) and ({"messages", "prompt"} & set(case.body)):
            case.body |= {"max_tokens": 2, "n": 1}  # long answers would find nothing more
        response = case.call_and_validate(checks=CHECKS, timeout=60)
        if aimed and mode == schemathesis.GenerationMode.POSITIVE:  # what a well-formed request about something gets
            codes.add(response.status_code)

    one()
    return codes


def test_every_operation(schema, known: dict[str, Any]) -> None:
    operations = sorted((r.ok() for r in schema.get_all_operations()), key=lambda o: o.method.upper() in LAST)
    codes = {f"{o.method.upper()} {o.path}": _fuzz(o, known) for o in operations}
    assert len(operations) >= 18
    aimed = {name: found for name, found in codes.items() if found}
    through = {name for name, found in aimed.items() if found & {200, 201, 202, 409}}
    # Without a body to get right, such a request must get through; of the others many do, depending on the draws.
    missed = {name for name in aimed if name.startswith("GET") and "/v1/runs" not in name} - through
    assert not missed, {name: codes[name] for name in missed}
    assert len(through) >= 10, codes


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(min_size=1, max_size=30)
    | st.sampled_from(["../../etc/passwd", "%2e%2e/x", "..%2f..", "a/../../b", "con", "\x00"])
)
def test_no_name_of_a_request_becomes_a_path(live: Live, name: str) -> None:
    """Names of adapters never become paths: the folder holds numbers only."""
    from urllib.parse import quote

    before = live.http.get(f"/v1/adapters/{quote(name, safe='')}/versions/1/export")
    assert before.status_code in (400, 404), before.text
    folders = live.state.store.folder / "adapters"
    assert not folders.exists() or all(f.name.strip(".").split(".")[0].isdigit() for f in folders.iterdir())
