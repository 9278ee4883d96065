"""Both sides of two connectors, step by step, with a real side channel and agents that move bytes in this process."""

import time
from dataclasses import replace

import pytest
from kv_connector.nixl_doubles import Network, config_of, make_caches
from kv_connector.pull_doubles import TO_DECODE, Block, Clock, PullEngine, all_equal
from kv_connector.test_nixl_side_channel import free_port
from patience import PATIENCE, eventually

from minivllm.core.kv_connector import KVConnectorConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.errors import MinivllmError
from minivllm.kv_connector import pull_scheduler
from minivllm.kv_connector.nixl.scheduler import NixlConnectorScheduler, side_channel_address
from minivllm.kv_connector.nixl.worker import NixlConnectorWorker
from minivllm.kv_connector.pull_params import digest


class Engine(PullEngine):
    """Over agents of a `Network`."""

    def __init__(
        self, config: KVConnectorConfig, network: Network, monkeypatch, lease: float = 30.0, rank: int = 0
    ) -> None:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        extra = {"kv_lease_duration": lease, "handshake_timeout": 2.0, "read_timeout": PATIENCE}
        transfer = replace(config.kv_transfer_config, kv_connector_extra_config=extra)
        self.config = config = replace(config, kv_transfer_config=transfer)
        self.caches = make_caches(config, fill=transfer.engine_id == "P")
        self.scheduler = NixlConnectorScheduler(config)
        metadata = {}
        for self.rank in range(rank + 1):  # the last one is this engine's; of the others there is only the metadata
            self.worker = NixlConnectorWorker(replace(config, tensor_parallel_rank=self.rank), make_agent=network.agent)
            self.worker.register_kv_caches(self.caches)
            metadata[self.rank] = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata(metadata)

    @property
    def agent(self):
        return self.worker._agent

    def take(self, name: str, num_tokens: int, params: dict) -> Request:
        request = Request(name, range(num_tokens), max_tokens=4, kv_transfer_params=params)
        self.scheduler.on_new_request(request)
        return request


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def pair(network, monkeypatch):
    engines = [Engine(config_of(name), network, monkeypatch) for name in ("P", "D")]
    yield engines
    for engine in engines:
        agent = engine.agent
        engine.worker.shutdown()
        engine.scheduler.shutdown()
        assert agent is None or agent.is_closed


def test_every_key_that_vllm_answers(pair):
    params = pair[0].prefill("r", 10, [5, 2, 9])
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[5, 2, 9]],
        "remote_engine_id": "P",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": pair[0].scheduler.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 10,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
        "remote_registration_generation": pair[0].worker._own.registration_generation,
        "remote_prompt_digest": digest(range(10)),
    }


def test_blocks_are_read_and_let_go_of(pair):
    p, d = pair
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    assert d.admit(request, [Block(1), Block(3), Block(4)]) == 10
    assert p.scheduler.is_held("r")
    output = d.step_until(lambda output: output.finished_recving)
    assert output.finished_recving == {"mine"}
    assert not output.failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert not any(tensor[[0, 2, 5]].any() for layer in d.caches.values() for tensor in layer)
    assert p.agent.inbox[-1] == b"r:1"
    assert p.step().finished_sending == {"r"}
    assert not p.scheduler.is_held("r")
    assert d.worker.get_kv_connector_stats()["nixl_num_descriptors"] == [12]  # 3 blocks, 2 layers, keys and values
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)  # after a preemption it is computed here


def test_a_partial_hit_reads_only_what_is_missing(pair):
    p, d = pair
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    assert d.admit(request, [Block(1, "hash"), Block(3), Block(4)]) == 6
    d.step_until(lambda output: output.finished_recving)
    assert all_equal(d.rows([3, 4]), p.rows([2, 9]))
    assert not any(tensor[1].any() for layer in d.caches.values() for tensor in layer)


def test_a_full_hit_reads_nothing_and_notifies(pair):
    p, d = pair
    request = d.take("mine", 8, p.prefill("r", 8, [5, 2]))
    d.scheduler.update_state_after_alloc(request, [Block(1, "hash"), Block(3, "hash")], 0)
    assert d.scheduler.has_pending_block_frees()
    d.step_until(lambda output: not d.scheduler.has_pending_block_frees())
    assert p.step_until(lambda output: output.finished_sending).finished_sending == {"r"}
    assert not d.agent.reads


def test_one_that_leaves_before_it_reads_notifies(pair):
    p, d = pair
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    request.status = RequestStatus.FINISHED_ABORTED
    assert d.scheduler.request_finished(request, []) == (False, None)
    d.step_until(lambda output: not d.scheduler.has_pending_block_frees())
    assert p.step().finished_sending == {"r"}


def test_one_that_leaves_while_it_reads_is_read_to_the_end(pair, network):
    p, d = pair
    network.polls_of_a_read = 5
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    d.admit(request, [Block(1), Block(3), Block(4)])
    d.step()
    request.status = RequestStatus.FINISHED_ABORTED
    assert d.scheduler.request_finished(request, [1, 3, 4]) == (False, None)
    assert d.step_until(lambda output: output.finished_recving).finished_recving == {"mine"}
    assert p.step().finished_sending == {"r"}


def test_of_two_requests_one_reads_and_the_other_waits(pair):
    """n = 2 at the client: both carry the same params, and the prefill engine lets go of the blocks once."""
    p, d = pair
    params = p.prefill("r", 10, [5, 2, 9])
    first, second = d.take("0_mine", 10, params), d.take("1_mine", 10, params)
    d.admit(first, [Block(1), Block(3), Block(4)])
    assert d.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    d.step_until(lambda output: output.finished_recving)
    assert d.scheduler.get_num_new_matched_tokens(second, 8) == (0, False)
    assert p.agent.inbox == [b"r:1"]
    first.status = second.status = RequestStatus.FINISHED_STOPPED
    d.scheduler.request_finished(first, [])
    d.scheduler.request_finished(second, [])
    assert not d.scheduler._claims
    assert not d.scheduler._claim_of


def test_of_two_requests_the_last_one_to_leave_notifies(pair):
    p, d = pair
    params = p.prefill("r", 10, [5, 2, 9])
    first, second = d.take("0_mine", 10, params), d.take("1_mine", 10, params)
    for request, told in ((first, []), (second, [b"r:1"])):
        request.status = RequestStatus.FINISHED_ABORTED
        d.scheduler.request_finished(request, [])
        d.step_until(lambda output: not d.scheduler.has_pending_block_frees())
        assert [message for message in p.agent.inbox if not message.startswith(b"HB:")] == told


def test_the_same_params_a_second_time_are_not_believed(pair):
    """Another decode engine, or the same one later: the blocks may be anyone's by now."""
    p, d = pair
    params = p.prefill("r", 10, [5, 2, 9])
    d.admit(d.take("mine", 10, dict(params)), [Block(1), Block(3), Block(4)])
    d.step_until(lambda output: output.finished_recving)
    p.step()
    request = d.take("again", 10, dict(params))
    d.scheduler._claims.clear()
    d.scheduler.on_new_request(request)
    assert d.admit(request, [Block(6), Block(7), Block(8)]) == 10
    output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"again"}
    assert output.invalid_block_ids == {6, 7, 8}


def test_each_rank_reads_from_its_own_peer(network, monkeypatch):
    p, d = (Engine(config_of(name, tensor_parallel_size=2), network, monkeypatch, rank=1) for name in ("P", "D"))
    params = p.prefill("r", 10, [5, 2, 9])
    assert len(set(params["remote_registration_generation"].split("."))) == 2
    d.admit(d.take("mine", 10, params), [Block(1), Block(3), Block(4)])
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert p.agent.inbox[-1] == b"r:2"
    for engine in (p, d):
        engine.worker.shutdown()
        engine.scheduler.shutdown()


def test_another_block_size_is_read_all_the_same(pair, network, monkeypatch):
    p, _ = pair
    d = Engine(config_of("D8", block_size=8, num_gpu_blocks=6), network, monkeypatch)
    d.admit(d.take("mine", 10, p.prefill("r", 10, [5, 2, 9])), [Block(4), Block(1)])
    d.step_until(lambda output: output.finished_recving)
    for mine, theirs in zip(d.caches.values(), p.caches.values(), strict=True):
        for here, there in zip(mine, theirs, strict=True):
            assert here[[4, 1]].flatten(0, 1)[:12].equal(there[[5, 2, 9]].flatten(0, 1))
    d.worker.shutdown()
    d.scheduler.shutdown()


@pytest.mark.parametrize(
    "other", [{"num_layers": 3}, {"model_fingerprint": "another"}, {"tensor_parallel_size": 2}], ids=str
)
def test_an_engine_that_does_not_fit_fails_that_request_only(pair, network, monkeypatch, other):
    p, _ = pair
    d = Engine(config_of("D2", **other), network, monkeypatch)
    params = p.prefill("r", 10, [5, 2, 9]) | {"tp_size": other.get("tensor_parallel_size", 1)}
    d.admit(d.take("mine", 10, params), [Block(1), Block(3), Block(4)])
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"mine"}
    assert d.worker.get_kv_connector_stats()["nixl_num_failed_transfers"] == 1
    d.worker.shutdown()
    d.scheduler.shutdown()


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
def test_params_that_are_not_true_fail_that_request_only(pair, changed):
    p, d = pair
    params = p.prefill("r", 10, [5, 2, 9])
    d.admit(d.take("mine", 10, params | changed), [Block(1), Block(3), Block(4)])
    output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"mine"}
    assert output.invalid_block_ids == {1, 3, 4}
    assert not any(tensor.any() for layer in d.caches.values() for tensor in layer)
    d.admit(d.take("another", 10, params), [Block(1), Block(3), Block(4)])
    assert not d.step_until(lambda output: output.finished_recving).failed_recving


@pytest.mark.parametrize(
    "missing", ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
)
def test_what_kills_vllms_engine_is_refused_at_once(pair, missing):
    params = pair[0].prefill("r", 10, [5, 2, 9])
    del params[missing]
    with pytest.raises(MinivllmError, match=missing):
        pair[1].take("mine", 10, params)
    with pytest.raises(MinivllmError):
        pair[1].take("mine", 10, {"do_remote_prefill": True})


def test_a_role_that_does_not_fit_is_refused(network, monkeypatch):
    p = Engine(config_of("P", "kv_producer"), network, monkeypatch)
    d = Engine(config_of("D", "kv_consumer"), network, monkeypatch)
    assert d.scheduler._side_channel is None  # nobody asks it
    with pytest.raises(MinivllmError, match=r"do_remote_prefill .*'kv_consumer'.* here kv_role is 'kv_producer'"):
        p.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    with pytest.raises(MinivllmError, match=r"do_remote_decode .*'kv_producer'.* here kv_role is 'kv_consumer'"):
        d.prefill("r", 10, [5, 2, 9])
    p.scheduler.shutdown()


@pytest.mark.parametrize(
    ("state", "cancels"), [("ERR", True), ("PROC", True)], ids=["the other end is gone", "it never ends"]
)
def test_a_read_that_fails_fails_that_request_only(pair, network, state, cancels):
    p, d = pair
    network.state_after, network.cancels, d.worker._read_timeout = state, cancels, 0.2
    params = p.prefill("r", 10, [5, 2, 9])
    d.admit(d.take("mine", 10, params), [Block(1), Block(3), Block(4)])
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"mine"}
    assert d.agent.reads[0].is_released
    network.state_after, d.worker._read_timeout = "DONE", PATIENCE
    p.step()
    d.admit(d.take("another", 10, p.prefill("s", 10, [5, 2, 9])), [Block(1), Block(3), Block(4)])
    assert not d.step_until(lambda output: output.finished_recving).failed_recving


def test_blocks_that_may_still_be_written_are_not_given_back(pair, network):
    p, d = pair
    network.state_after, network.cancels, d.worker._read_timeout = "PROC", False, 0.2
    d.admit(d.take("mine", 10, p.prefill("r", 10, [5, 2, 9])), [Block(1), Block(3), Block(4)])
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert not d.step().finished_recving
    network.state_after = "DONE"
    assert d.step_until(lambda output: output.finished_recving).finished_recving == {"mine"}


def test_a_prefill_engine_that_has_died_is_noticed(pair, network):
    p, d = pair
    params = p.prefill("r", 10, [5, 2, 9])
    d.admit(d.take("mine", 10, params), [Block(1), Block(3), Block(4)])
    d.step_until(lambda output: output.finished_recving)
    del network.agents[p.agent.name]
    d.admit(d.take("another", 10, params | {"remote_request_id": "s"}), [Block(1), Block(3), Block(4)])
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"another"}
    d.step()
    assert p.agent.name not in d.agent.prepared


def test_one_that_ends_otherwise_keeps_nothing(pair):
    p, _ = pair
    request = Request("r", range(10), max_tokens=1, kv_transfer_params=dict(TO_DECODE))
    p.scheduler.on_new_request(request)
    p.scheduler.update_state_after_alloc(request, [Block(1), Block(2), Block(3)], 0)
    p.step()
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_ABORTED, 8
    assert p.scheduler.request_finished(request, [1, 2, 3]) == (False, None)
    p.step()
    assert p.worker.leases.blocks_of("r") is None
    assert not p.scheduler.is_held("r")


def test_a_lease_ends_by_itself(network, monkeypatch):
    p, clock = Engine(config_of("P"), network, monkeypatch, lease=0.1), Clock()
    monkeypatch.setattr(p.worker.leases, "_clock", clock.monotonic)
    p.prefill("r", 10, [5, 2, 9])
    assert p.step().finished_sending == set()
    clock.now = 0.1
    assert p.step().finished_sending == {"r"}
    assert p.worker.get_kv_connector_stats() == {"nixl_num_kv_expired_reqs": 1}
    assert not p.scheduler.is_held("r")
    p.worker.shutdown()
    p.scheduler.shutdown()


def test_heartbeats_keep_what_waits(network, monkeypatch):
    clock, lease_clock = Clock(), Clock()
    monkeypatch.setattr(pull_scheduler, "time", clock)
    p, d = (Engine(config_of(name), network, monkeypatch, lease=0.3) for name in ("P", "D"))
    monkeypatch.setattr(p.worker.leases, "_clock", lease_clock.monotonic)
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    p.step()

    def is_heard() -> bool:
        clock.now += 0.1
        d.step()
        return bool(p.agent.inbox)

    assert eventually(is_heard, pause=0.002), "the two engines meet"
    for _ in range(100):
        clock.now += 0.01
        lease_clock.now += 0.01
        d.step()
        assert not p.step().finished_sending
    d.admit(request, [Block(1), Block(3), Block(4)])
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert p.step().finished_sending == {"r"}
    for engine in (p, d):
        engine.worker.shutdown()
        engine.scheduler.shutdown()


def test_after_a_failed_step_nothing_is_written_and_what_was_kept_is_kept(pair, network):
    p, d = pair
    params = p.prefill("r", 10, [5, 2, 9])
    network.polls_of_a_read = 1000
    d.admit(d.take("mine", 10, params), [Block(1), Block(3), Block(4)])
    until = time.monotonic() + PATIENCE
    while not d.agent.reads and time.monotonic() < until:
        d.step()
    p.scheduler.build_connector_meta(None)  # what the ranks were to be told is lost
    for engine in (p, d):
        engine.worker.reset()
        engine.scheduler.start_over()
    assert d.agent.reads[0].is_released
    assert p.scheduler.is_held("r")
    assert d.scheduler.has_pending_block_frees()
    d.step_until(lambda output: not d.scheduler.has_pending_block_frees())  # it was given up, which the other is told
    assert p.step_until(lambda output: output.finished_sending).finished_sending == {"r"}
    assert not any(tensor.any() for layer in d.caches.values() for tensor in layer)


def test_a_release_that_was_lost_with_a_step_is_told_again(pair):
    p, d = pair
    request = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]))
    request.status = RequestStatus.FINISHED_ABORTED
    d.scheduler.request_finished(request, [])
    d.scheduler.build_connector_meta(None)
    d.worker.reset()
    d.scheduler.start_over()
    d.step_until(lambda output: not d.scheduler.has_pending_block_frees())
    assert p.step().finished_sending == {"r"}


@pytest.mark.parametrize("port", ["x", "0", "65535", "-1"])
def test_a_port_that_is_none(port):
    with pytest.raises(MinivllmError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        side_channel_address(
            1, {"VLLM_NIXL_SIDE_CHANNEL_PORT": port} if port != "0" else {"VLLM_NIXL_SIDE_CHANNEL_PORT": "x0"}
        )


def test_each_core_has_a_port_of_its_own():
    assert side_channel_address(0, {}) == ("localhost", 5600)
    assert side_channel_address(2, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}) == ("localhost", 7002)
