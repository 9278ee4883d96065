"""Both sides of two NIXL connectors, step by step, with a real side channel and agents that move
bytes in this process.

What also holds for the TCP connector is in `test_pull_transfer.py`.
"""

import time

import pytest
from kv_connector.nixl_doubles import Network, NixlEngine
from kv_connector.pull_doubles import TO_DECODE, Block, all_equal, blocks_of, check_given_back, engines
from patience import PATIENCE, eventually
from refusals import assert_refused

from minivllm.core.request import Request, RequestStatus
from minivllm.kv_connector.nixl.scheduler import side_channel_address


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def engine(network):
    with engines(NixlEngine, network) as make:
        yield make


def releases(engine) -> list[bytes]:
    """Return the messages to this engine that are not heartbeats."""
    return [message for message in engine.agent.inbox if not message.startswith(b"HB:")]


def test_a_release_says_how_many_ranks_have_read_and_bytes_are_counted(p, d):
    assert not d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving
    assert releases(p) == [b"r:1"]
    assert d.worker.get_kv_connector_stats()["nixl_bytes_transferred"] == [
        sum(block.nbytes for block in d.rows([1, 3, 4]))
    ]


def test_a_full_hit_reads_nothing_and_notifies(p, d):
    request = d.take("mine", 8, p.prefill("r", 8, [5, 2]))
    d.scheduler.update_state_after_alloc(request, [Block(1, "hash"), Block(3, "hash")], 0)
    check_given_back(p, d)
    assert not d.agent.reads


def test_a_request_that_is_aborted_while_it_reads_is_read_to_the_end(p, d, network):
    network.polls_of_a_read = 5
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    d.admit(request, blocks_of(1, 3, 4))
    d.step()
    d.abort(request, [1, 3, 4])
    assert d.step_until(lambda output: output.finished_recving).finished_recving == {"mine"}
    assert p.step().finished_sending == {"r"}


def test_of_two_requests_one_reads_and_the_other_waits(p, d):
    """A client's n = 2 gives both the same params, and the prefill engine frees the blocks once."""
    params = p.prefill("r", 10, [5, 2, 9])
    first, second = d.take("0_mine", 10, params), d.take("1_mine", 10, params)
    d.admit(first, blocks_of(1, 3, 4))
    assert d.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    d.step_until(lambda output: output.finished_recving)
    assert d.scheduler.get_num_new_matched_tokens(second, 8) == (0, False)
    assert p.agent.inbox == [b"r:1"]
    for request in (first, second):
        d.abort(request)
    assert not d.scheduler._claims
    assert not d.scheduler._claim_of


def test_of_two_requests_the_last_one_to_leave_notifies(p, d):
    params = p.prefill("r", 10, [5, 2, 9])
    requests = [d.take(name, 10, params) for name in ("0_mine", "1_mine")]
    for request, expected in zip(requests, ([], [b"r:1"]), strict=True):
        d.abort(request)
        d.step_until(lambda _: not d.scheduler.has_pending_block_frees())
        assert releases(p) == expected


def test_the_same_params_a_second_time_are_not_believed(p, d):
    """The blocks may be another request's by then, whichever decode engine sends the params again."""
    params = p.prefill("r", 10, [5, 2, 9])
    d.load("mine", 10, dict(params), 1, 3, 4)
    p.step()
    d.scheduler._claims.clear()
    output = d.load("again", 10, dict(params), 6, 7, 8)
    assert output.failed_recving == {"again"}


def test_each_rank_reads_from_its_own_peer(engine):
    p, d = (engine(name, tensor_parallel_size=2, rank=1) for name in ("P", "D"))
    params = p.prefill("r", 10, [5, 2, 9])
    assert len(set(params["remote_registration_generation"].split("."))) == 2
    assert not d.load("mine", 10, params, 1, 3, 4).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert releases(p) == [b"r:2"]


@pytest.mark.parametrize(
    "other", [{"block_size": 8}, {"model_fingerprint": "another"}, {"tensor_parallel_size": 2}], ids=str
)
def test_an_engine_that_does_not_fit_fails_that_request_only(engine, other):
    p, d = engine("P"), engine("D2", **other)
    params = p.prefill("r", 10, [5, 2, 9]) | {"tp_size": other.get("tensor_parallel_size", 1)}
    assert d.load("mine", 10, params, 1, 3, 4).failed_recving == {"mine"}
    assert d.worker.get_kv_connector_stats()["nixl_num_failed_transfers"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_block_ids": [[5, 2]]},
        {"remote_block_ids": [[5, 2, 16]]},
        {"remote_engine_id": "somebody else"},
        {"remote_registration_generation": "an older one"},
        {"remote_port": 1},
    ],
    ids=str,
)
def test_params_that_are_not_true_fail_that_request_only(p, d, changed, monkeypatch):
    params = p.prefill("r", 10, [5, 2, 9])
    with monkeypatch.context() as patch:
        patch.setattr(d.worker, "_handshake_timeout", 0.1 if "remote_port" in changed else PATIENCE)
        assert d.load("mine", 10, params | changed, 1, 3, 4).failed_recving == {"mine"}
    assert not any(tensor.any() for layer in d.caches.values() for tensor in layer)
    assert not d.load("another", 10, params, 1, 3, 4).failed_recving


def test_a_role_that_does_not_fit_is_refused(engine):
    p, d = engine("P", role="kv_producer"), engine("D", role="kv_consumer")
    assert d.scheduler._side_channel is None, "no engine asks it"
    params = p.prefill("r", 10, [5, 2, 9])
    assert_refused(r"do_remote_prefill .*'kv_consumer'.* here kv_role is 'kv_producer'", p.take, "mine", 10, params)
    assert_refused(r"do_remote_decode .*'kv_producer'.* here kv_role is 'kv_consumer'", d.prefill, "r", 10, [5, 2, 9])


@pytest.mark.parametrize("state", ["ERR", "PROC"], ids=["the other end is gone", "it never ends"])
def test_a_read_that_fails_fails_that_request_only(p, d, network, state):
    network.state_after, d.worker._read_timeout = state, 0.2
    assert d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving == {"mine"}
    assert d.agent.reads[0].is_released
    network.state_after, d.worker._read_timeout = "DONE", PATIENCE
    p.step()
    assert not d.load("another", 10, p.prefill("s", 10, [5, 2, 9]), 1, 3, 4).failed_recving


def test_blocks_that_may_still_be_written_are_not_given_back(p, d, network):
    network.state_after, network.cancels, d.worker._read_timeout = "PROC", False, 0.2
    d.admit(d.take("mine", 10, p.prefill("r", 10, [5, 2, 9])), blocks_of(1, 3, 4))
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert not d.step().finished_recving
    network.state_after = "DONE"
    assert d.step_until(lambda output: output.finished_recving).finished_recving == {"mine"}


def test_nothing_that_was_prepared_for_a_peer_outlives_it(p, d):
    params = p.prefill("r", 10, [5, 2, 9])
    d.load("mine", 10, params, 1, 3, 4)
    assert p.agent.name in d.agent.prepared
    name = p.agent.name
    p.close()
    d.load("another", 10, params | {"remote_request_id": "s"}, 1, 3, 4)
    d.step()
    assert name not in d.agent.prepared


def test_a_prefill_that_is_aborted_keeps_nothing(p):
    request = Request("r", range(10), max_tokens=1, kv_transfer_params=dict(TO_DECODE))
    p.scheduler.on_new_request(request)
    p.scheduler.update_state_after_alloc(request, blocks_of(1, 2, 3), 0)
    p.step()
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_ABORTED, 8
    assert p.scheduler.request_finished(request, [1, 2, 3]) == (False, None)
    p.step()
    assert p.worker.leases.blocks_of("r") is None
    assert not p.scheduler.is_held("r")


def test_after_a_failed_step_nothing_is_written_and_the_blocks_are_given_up(p, d, network):
    network.polls_of_a_read = 1000
    d.admit(d.take("mine", 10, p.prefill("r", 10, [5, 2, 9])), blocks_of(1, 3, 4))
    assert eventually(lambda: d.step() and d.agent.reads, pause=0.002)
    d.fail_a_step()
    assert d.agent.reads[0].is_released
    check_given_back(p, d)
    assert not any(tensor.any() for layer in d.caches.values() for tensor in layer)


def test_the_environment_says_where_the_side_channel_is():
    assert side_channel_address({}) == ("localhost", 5600)
    assert side_channel_address({"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}) == ("localhost", 7000)
    for port in ("x", "65536", "-1"):
        assert_refused("VLLM_NIXL_SIDE_CHANNEL_PORT", side_channel_address, {"VLLM_NIXL_SIDE_CHANNEL_PORT": port})
