"""Each row of the table of claims: every token is the oracle's, and its settings had an effect."""

from __future__ import annotations

import pytest

from common.tests.claims import CLAIMS, Claim, cases_of

pytestmark = pytest.mark.usefixtures("one_thread")


@cases_of(CLAIMS)
def test_every_token_is_right(claim: Claim, model: str, number: int) -> None:
    claim.hold(model, number)
