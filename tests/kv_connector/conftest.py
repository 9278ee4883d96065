"""A prefill and a decode engine, of whatever kind a file's `engine` makes."""

import pytest


@pytest.fixture
def p(engine):
    return engine("P")


@pytest.fixture
def d(engine, p):
    return engine("D")
