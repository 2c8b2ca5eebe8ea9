"""The API against its own schema: whatever is sent, no server error, and only answers that the schema announces."""

from __future__ import annotations

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
EXAMPLES = 8


@pytest.fixture(scope="module")
def schema(live: Live):
    live.state.wait()
    found = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    return found.include(path_regex="^/(v1|health)").exclude(path="/v1/events")


def _fuzz(operation) -> None:
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
        case.call_and_validate(checks=CHECKS, timeout=60)

    one()


def test_every_operation(schema) -> None:
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:
        _fuzz(operation)
    assert len(operations) >= 18


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(min_size=1, max_size=30)
    | st.sampled_from(["../../etc/passwd", "%2e%2e/x", "..%2f..", "a/../../b", "con", "\x00"])
)
def test_no_name_reaches_the_disk(live: Live, name: str) -> None:
    """Names of adapters never become paths: whatever is asked for, the folder holds numbers only."""
    from urllib.parse import quote

    before = live.http.get(f"/v1/adapters/{quote(name, safe='')}/versions/1/export")
    assert before.status_code in (400, 404), before.text
    folders = live.state.store.folder / "adapters"
    assert not folders.exists() or all(f.name.strip(".").split(".")[0].isdigit() for f in folders.iterdir())
