"""`schemathesis` makes requests of the schema that the server shows: it never says 500, and answers
only as the schema says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks as openapi_checks

from common.serve.app import ServeConfig
from common.serve.conftest import MODEL, TEMPLATE, Running, running

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    """Its answers are short, whatever `max_tokens` is."""
    with running(ServeConfig(MODEL, chat_template=TEMPLATE), max_model_len=24) as found:
        yield found
        assert found.is_idle()


def request_schema(server: Running, num_examples: int, number: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {o.path for o in operations} >= {"/v1/completions", "/health", "/metrics"}
    cases = st.one_of(*(o.as_strategy(generation_mode=m) for o in operations for m in MODES))

    @seed(number)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def answers(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)

    answers()


def test_thirty_requests_of_the_schema(short: Running) -> None:
    paths = json.loads(short.request("GET", "/openapi.json")[2])["paths"]
    answers = paths["/v1/completions"]["post"]["responses"]
    assert "text/event-stream" in answers["200"]["content"] and {"4XX", "5XX"} < answers.keys()
    assert "/events" not in paths
    request_schema(short, 30, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 5))
def test_many_requests_of_the_schema(short: Running, number: int) -> None:
    request_schema(short, 500, number)
    assert short.is_idle()
