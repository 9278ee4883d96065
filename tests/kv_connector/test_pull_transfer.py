"""Test both connectors whose decode engine pulls, step by step: blocks that are read, kept and
released.
"""

import pytest
from kv_connector.nixl_doubles import Network, NixlEngine
from kv_connector.pull_doubles import Block, Clock, all_equal, blocks_of, check_given_back, engines
from kv_connector.tcp_doubles import tcp_engines
from patience import eventually
from refusals import assert_refused

from minivllm.core.request import Request
from minivllm.kv_connector import pull_scheduler
from minivllm.kv_connector.pull_params import digest


@pytest.fixture(params=["nixl", "tcp"])
def engine(request):
    """Yield a function that makes engines, and close them before `monkeypatch` is undone."""
    with engines(NixlEngine, Network()) if request.param == "nixl" else tcp_engines() as make:
        yield make


def test_a_client_gets_every_key_that_vllm_answers(p):
    params = p.prefill("r", 10, [5, 2, 9])
    assert params.pop("remote_port") > 0
    assert isinstance(params.pop("remote_registration_generation"), str)
    assert params == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[5, 2, 9]], "remote_engine_id": "P",
        "remote_request_id": "r", "remote_host": "127.0.0.1", "tp_size": 1, "dcp_size": 1, "pp_size": 1,
        "remote_num_tokens": 10, "remote_blocks_expiry_time": None, "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0, "remote_prompt_digest": digest(range(10)),
    }  # fmt: skip


def test_blocks_are_read_and_released(p, d):
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    assert d.admit(request, blocks_of(1, 3, 4)) == 10
    assert p.scheduler.is_held("r")
    output = d.step_until(lambda output: output.finished_recving)
    assert (output.finished_recving, output.failed_recving) == ({"mine"}, set())
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert not any(rows.any() for rows in d.rows([0, 2, 5, 6, 7]))
    assert p.step_until(lambda output: output.finished_sending).finished_sending == {"r"}
    assert not p.scheduler.is_held("r")
    # After a preemption it is computed here.
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_only_what_the_prefix_cache_lacks_is_read(p, d):
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    assert d.admit(request, [Block(1, "hash"), Block(3), Block(4)]) == 6
    d.step_until(lambda output: output.finished_recving)
    assert all_equal(d.rows([3, 4]), p.rows([2, 9]))
    assert not any(rows.any() for rows in d.rows([1]))


def test_a_request_that_is_aborted_before_it_reads_gives_the_blocks_back(p, d):
    d.abort(d.take("mine", 10, p.prefill("r", 10, [5, 2, 9])))
    check_given_back(p, d)


@pytest.mark.parametrize(
    "prompt", [range(1, 11), range(9), [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]], ids=["other", "shorter", "swapped"]
)
def test_blocks_of_another_prompt_are_refused_and_given_back(p, d, prompt):
    params = p.prefill("r", 10, [5, 2, 9])
    request = Request("mine", prompt, max_tokens=4, kv_transfer_params=params)
    assert_refused("of another prompt", d.scheduler.on_new_request, request)
    check_given_back(p, d)
    d.take("longer", 14, {**params, "remote_request_id": "s"})


def test_a_prefill_engine_that_is_gone_fails_the_load_and_the_step_goes_on(p, d):
    first, second = p.prefill("r", 10, [5, 2, 9]), p.prefill("s", 10, [3, 4, 6])
    assert not d.load("mine", 10, first, 1, 3, 4).failed_recving
    p.close()
    output = d.load("next", 10, second, 5, 6, 7)
    assert output.failed_recving == {"next"}


def test_a_lease_ends_without_heartbeats_and_not_with_them(engine, monkeypatch):
    clock, lease_clock = Clock(), Clock()
    monkeypatch.setattr(pull_scheduler, "time", clock)
    p, d = engine("P", lease=1.0), engine("D", lease=1.0)
    monkeypatch.setattr(p.worker.leases, "_clock", lease_clock.monotonic)
    heard, renew = [], p.worker.leases.renew
    monkeypatch.setattr(p.worker.leases, "renew", lambda ids: renew(ids) or heard.append(ids))
    d.take("mine", 10, p.prefill("kept", 10, [5, 2, 9]))
    p.prefill("left", 10, [3, 4, 6])
    gone = set()

    def is_heard(times: int) -> bool:
        clock.now += 0.25
        d.step()
        gone.update(p.step().finished_sending)
        return len(heard) >= times

    for times in range(9):
        assert eventually(lambda times=times: is_heard(times + 1), pause=0.002)
        heard[times + 1 :] = []
        lease_clock.now += 0.25
    assert gone == {"left"}
    expired = {name: count for name, count in p.worker.get_kv_connector_stats().items() if "expired" in name}
    assert list(expired.values()) == [1]
    assert not p.scheduler.is_held("left")


def test_after_a_failed_step_the_blocks_are_still_kept(p, d):
    params = p.prefill("r", 10, [5, 2, 9])
    p.fail_a_step()
    p.step()
    assert not d.load("mine", 10, params, 1, 3, 4).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_a_release_that_was_lost_with_a_step_is_sent_again(p, d):
    d.abort(d.take("mine", 10, p.prefill("r", 10, [5, 2, 9])))
    d.scheduler.build_connector_meta(None)
    d.fail_a_step()
    check_given_back(p, d)
