"""Test what clients have seen of an open load when it stops while some of their answers are
unfinished.
"""

from minivllm_simulate.open_load import OpenRun, Stay

ENDED = Stay(0.0, 3, first=0.25, last=1.25, tokens=3, ended=True)
FIRST_ONLY = Stay(1.0, 3, first=1.5, last=1.5, tokens=1)
WAITING = Stay(1.0, 3)


def test_who_has_no_token_yet_has_waited_until_the_end_and_time_per_token_needs_two():
    run = OpenRun([WAITING, FIRST_ONLY, ENDED], end=4.0)
    assert [run.ttft(stay) for stay in run.stays] == [3.0, 0.5, 0.25]
    assert run.ttfts == [0.25, 0.5, 3.0]
    assert run.tpots == [0.5]
