"""`schemathesis` makes requests of the schema that the server shows: it never says 500, and answers
only as the schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks as openapi_checks

from common.serve.conftest import Running

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
LARGE = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "num"), [(0, 30), *(pytest.param(i, 500, marks=LARGE) for i in range(1, 5))]
)
def test_requests_of_the_schema(short: Running, number: int, num: int) -> None:
    paths = json.loads(short.request("GET", "/openapi.json")[2])["paths"]
    answers = paths["/v1/completions"]["post"]["responses"]
    assert "text/event-stream" in answers["200"]["content"] and {"4XX", "5XX"} < answers.keys()
    assert "/events" not in paths and {"/v1/completions", "/health", "/metrics"} <= paths.keys()
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    cases = st.one_of(*(o.as_strategy(generation_mode=m) for o in operations for m in MODES))
    checks = list(HealthCheck)

    @seed(number)
    @settings(max_examples=num, deadline=None, database=None, suppress_health_check=checks)
    @given(cases)
    def answers_well(case: Any) -> None:
        case.call_and_validate(base_url=short.url, checks=CHECKS, timeout=60)

    answers_well()
    assert short.is_idle()
