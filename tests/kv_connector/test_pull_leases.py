"""Test leases on a fake clock."""

import pytest
from kv_connector.pull_doubles import Clock

from minivllm.kv_connector.nixl.worker import consumed_message, heartbeat_message, take_notifications
from minivllm.kv_connector.pull_leases import REMEMBERED, Leases


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock) -> Leases:
    leases = Leases(30.0, clock.monotonic)
    leases.grant({"a": [1, 2], "b": [3]})
    return leases


NONE = (set(), set())


def test_a_lease_ends_after_its_time_and_only_once(leases, clock):
    clock.now += 29.9
    assert leases.take_ended() == NONE
    clock.now += 0.1
    assert leases.take_ended() == (set(), {"a", "b"})
    assert leases.take_ended() == NONE
    assert leases.blocks_of("a") is None


def test_a_heartbeat_renews_for_two_thirds_and_never_shortens(leases, clock):
    take_notifications(leases, [heartbeat_message({"a", "nobody"})])  # 20 s from now, while 30 are left
    clock.now += 29.0
    assert leases.take_ended() == NONE
    take_notifications(leases, [heartbeat_message({"a"})])
    assert leases.take_ended() == NONE
    clock.now += 1.0
    assert leases.take_ended() == (set(), {"b"})
    clock.now += 18.9
    assert leases.take_ended() == NONE
    clock.now += 0.2
    assert leases.take_ended() == (set(), {"a"})


def test_a_notification_ends_it(leases, clock):
    take_notifications(leases, [consumed_message("a", 1), consumed_message("a", 8)])
    assert leases.take_ended() == ({"a"}, set())
    clock.now += 60
    assert leases.take_ended() == (set(), {"b"})


def test_one_that_was_read_before_its_lease_began_has_none(leases):
    take_notifications(leases, [b"early:1"])
    assert leases.take_ended() == NONE
    leases.grant({"early": [4]})
    assert leases.take_ended() == ({"early"}, set())
    assert leases.blocks_of("a") == (1, 2)
    assert leases.blocks_of("b") == (3,)


def test_one_that_is_granted_again_is_told_as_ended_again(leases, clock):
    """A failed step loses what the ranks have reported, so the scheduler does not know it."""
    take_notifications(leases, [b"a:1"])
    leases.take_ended()
    clock.now += 30
    assert leases.take_ended() == (set(), {"b"})
    leases.grant({"a": [1, 2], "b": [3]})
    assert leases.take_ended() == ({"a"}, set())
    clock.now += 30
    assert leases.take_ended() == (set(), {"b"})


def test_it_does_not_remember_for_ever(leases):
    take_notifications(leases, [consumed_message(f"stranger {n}", 1) for n in range(2 * REMEMBERED)])
    assert len(leases._released) == REMEMBERED
    leases.grant({"stranger 0": [5]})
    assert leases.take_ended() == NONE


def test_what_it_does_not_understand_changes_nothing(leases):
    take_notifications(leases, [b"", b":", b"nobody:1", b"HB:", b"\xff\xfe:1", b"HB:\xff,,", b"a"])
    assert leases.take_ended() == NONE
    assert leases.blocks_of("a") == (1, 2)
    assert leases.blocks_of("b") == (3,)


def test_ids_may_have_colons():
    leases = Leases(30.0)
    leases.grant({"cmpl:1": [1]})
    take_notifications(leases, [b"cmpl:1:2"])
    assert leases.take_ended() == ({"cmpl:1"}, set())
