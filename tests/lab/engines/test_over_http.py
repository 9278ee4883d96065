"""A load whose clients leave is served again where the machine was too busy for them to leave in
time.
"""

import pytest

from minivllm.config import NO_PARTS
from minivllm_lab.engines import over_http
from minivllm_lab.engines.over_http import TRIES, Client, Load, serve_load

STAYS, LEAVES = Client(prompt="x"), Client(prompt="x", leaves_after=2)


@pytest.mark.parametrize(
    ("clients", "aborted", "tries"),
    [([STAYS], [0], 1), ([STAYS, LEAVES], [1], 1), ([LEAVES, LEAVES], [1, 2], 2), ([LEAVES], [0] * TRIES, TRIES)],
    ids=["nobody leaves", "all leave in time", "one leaves too late", "a part that never aborts"],
)
def test_a_load_is_served_until_all_have_left_in_time(monkeypatch, clients, aborted, tries):
    loads = [Load([], number, 9, 9) for number in aborted]
    left = iter(loads)
    monkeypatch.setattr(over_http, "_load_once", lambda *arguments: next(left))
    assert serve_load(clients, NO_PARTS) is loads[-1]
    assert len(loads) - len(list(left)) == tries
