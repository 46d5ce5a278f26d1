"""A connector by flag: what is wrong with it is said before an engine is made."""

from __future__ import annotations

import json

import pytest

from common.serve.__main__ import parse_args
from common.serve.flags import engine_settings
from common.serve.fleet.programs import free_port

STORE = {"kind": "mooncake", "master": "127.0.0.1:1", "metadata": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (STORE | {"kind": "nixl"}, "must have kind"),
        ({"kind": "mooncake", "master": "127.0.0.1:1"}, "'metadata'"),
        (STORE | {"port": 1}, "'port'"),
        (STORE | {"master": f"127.0.0.1:{free_port()}"}, "cannot reach a Mooncake store"),
    ],
)
def test_a_connector_that_cannot_be_made_is_a_sentence(fields: dict, reason: str) -> None:
    args = parse_args(["--kv-connector", json.dumps(fields)])
    with pytest.raises(ValueError, match="kv_connector") as error:
        engine_settings(args)
    assert reason in str(error.value)
