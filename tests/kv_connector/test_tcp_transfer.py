"""Both sides of two TCP connectors, step by step, over real sockets: what arrives, what is let go of, what fails."""

import threading
import time
from dataclasses import replace

import pytest
from kv_connector.pull_doubles import Block, Clock, all_equal
from kv_connector.tcp_doubles import Engine, tcp_config
from patience import PATIENCE, eventually

from minivllm.core.kv_connector import KVConnectorRole
from minivllm.core.request import Request, RequestStatus
from minivllm.errors import MinivllmError
from minivllm.kv_connector import pull_scheduler
from minivllm.kv_connector.factory import create_connector
from minivllm.kv_connector.pull_params import RemotePrefill, digest
from minivllm.kv_connector.tcp.connector import TCPConnector
from minivllm.kv_connector.tcp.kept import KeptBlocks
from minivllm.kv_connector.tcp.peer import Load
from minivllm.kv_connector.tcp.transport import Connection, PieceSent, RefusedError, Release, TransferError
from minivllm.kv_connector.tcp.worker import MOST_ENGINES


@pytest.fixture
def a_frame_for_each_layer(monkeypatch):
    """Pieces of four blocks of a layer at most, so that small caches have several."""
    monkeypatch.setattr("minivllm.kv_connector.tcp.staging.BlockStaging.__init__.__defaults__", (2048,))


@pytest.fixture
def engine():
    """Makes engines, and closes them afterwards: no thread is left."""
    made, threads = [], threading.active_count()

    def make(*arguments, **named):
        made.append(Engine(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert threading.active_count() <= threads


def blocks_of(*ids):
    return [Block(one) for one in ids]


def test_what_a_client_is_told_is_what_nixl_tells(engine):
    p = engine("P")
    params = p.prefill("r", 10, [5, 2, 9])
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[5, 2, 9]],
        "remote_engine_id": "P",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": p.worker.get_handshake_metadata()["port"],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 10,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
        "remote_registration_generation": "",
        "remote_prompt_digest": digest(range(10)),
    }


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_blocks_arrive_and_are_let_go_of(engine, dtype, monkeypatch):
    if dtype == "int8":
        monkeypatch.setattr("kv_connector.tcp_doubles.make_caches", int8_caches)
    p, d = engine("P"), engine("D")
    request, found = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    assert found == 10
    output = d.step_until(lambda output: output.finished_recving)
    assert output.finished_recving == {request.request_id}
    assert not output.failed_recving
    assert not output.invalid_block_ids
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert not any(tensor[[2, 5, 6, 7]].any() for layer in d.caches.values() for tensor in layer)
    assert p.step_until(lambda output: output.finished_sending).finished_sending == {"r"}
    stats = d.worker.take_stats()
    assert stats["tcp_bytes_transferred"] == [3 * d.worker.staging.block_bytes]


def int8_caches(config, fill):
    import torch

    shape = (config.num_gpu_blocks, config.block_size, config.num_kv_heads, config.head_dim)
    scales = (config.num_gpu_blocks, config.num_kv_heads, config.block_size)
    kinds = [(shape, torch.int8)] * 2 + [(scales, torch.float32)] * 2
    make = (
        (lambda one, kind: torch.randint(1, 99, one).to(kind))
        if fill
        else (lambda one, kind: torch.zeros(one).to(kind))
    )
    return {f"layer {layer}": tuple(make(*one) for one in kinds) for layer in range(config.num_layers)}


def test_only_what_the_prefix_cache_lacks_is_read(engine):
    p, d = engine("P"), engine("D")
    blocks = [Block(1, "hashed"), Block(3), Block(4)]
    _, found = d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks)
    assert found == 6
    d.step_until(lambda output: output.finished_recving)
    assert all_equal(d.rows([3, 4]), p.rows([2, 9]))
    assert not any(one.any() for one in d.rows([1]))


def test_many_pieces_of_many_requests_at_once(engine, monkeypatch):
    """Pieces of one or two blocks, so that a transfer has many frames, and its last piece fewer blocks."""
    monkeypatch.setattr("minivllm.kv_connector.tcp.staging.BlockStaging.__init__.__defaults__", (1100,))
    p, d = engine("P"), engine("D")
    orders = {f"r{index}": (list(range(1, 1 + index)), list(range(15, 15 - index, -1))) for index in range(1, 6)}
    for name, (there, here) in orders.items():
        d.take(f"my {name}", 4 * len(there), p.prefill(name, 4 * len(there), there), blocks_of(*here))
        d.step_until(lambda output, name=name: f"my {name}" in output.finished_recving)
        assert all_equal(d.rows(here), p.rows(there))
    assert len(list(p.worker.staging.pieces(5))) == 6
    assert [piece.layers for piece in p.worker.staging.pieces(1)] == [2]


@pytest.mark.parametrize("tokens", [9, 12])
def test_layer_by_layer_within_the_step(engine, tokens):
    """The last token of the prompt is computed in that step, so its block is read only if it has others in it."""
    p, d = engine("P"), engine("D", {"layerwise": True})
    params = p.prefill("r", tokens, [5, 2, 9])
    request, found = d.take("mine", tokens, params, blocks_of(1, 3, 4))
    assert found == tokens - 1
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    output = d.step()
    assert output.is_empty()
    count = 2 if tokens == 9 else 3
    assert all_equal(d.rows([1, 3, 4][:count]), p.rows([5, 2, 9][:count]))
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_a_layer_is_waited_for_and_no_later_one(engine, monkeypatch, a_frame_for_each_layer):
    p, d = engine("P"), engine("D", {"layerwise": True})
    held, sent = threading.Event(), Connection.send

    def send(self, message, *rest):
        if getattr(message, "layer", 0) == 1:
            held.wait(PATIENCE)
        return sent(self, message, *rest)

    monkeypatch.setattr(Connection, "send", send)
    d.take("mine", 12, p.prefill("r", 12, [5, 2, 9]), blocks_of(1, 3, 4))
    d.worker.start_load_kv(d.scheduler.build_connector_meta())
    d.worker.wait_for_layer_load("layer 0")
    assert d.caches["layer 0"][0][[1, 3, 4]].equal(p.caches["layer 0"][0][[5, 2, 9]])
    assert not d.caches["layer 1"][0].any()
    held.set()
    d.worker.wait_for_layer_load("layer 1")
    assert d.caches["layer 1"][1][[1, 3, 4]].equal(p.caches["layer 1"][1][[5, 2, 9]])


def test_aborted_before_reading_it_is_given_back(engine):
    p, d = engine("P"), engine("D")
    request = Request("mine", range(10), max_tokens=4, kv_transfer_params=p.prefill("r", 10, [5, 2, 9]))
    d.scheduler.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert d.scheduler.request_finished(request, []) == (False, None)
    assert d.scheduler.has_pending_block_frees()
    d.step()
    p.step_until(lambda output: output.finished_sending == {"r"})
    d.step_until(lambda _: not d.scheduler.has_pending_block_frees())


def test_a_lease_ends_without_heartbeats_and_not_with_them(engine, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pull_scheduler, "time", clock)
    p, d = engine("P", {"kv_lease_duration": 1.0}), engine("D", {"kv_lease_duration": 1.0})
    monkeypatch.setattr(p.worker.kept._leases, "_clock", clock.monotonic)
    heard, heartbeat = [], p.worker.kept.heartbeat
    monkeypatch.setattr(p.worker.kept, "heartbeat", lambda ids: heartbeat(ids) or heard.append(ids))
    kept = Request("mine", range(10), max_tokens=4, kv_transfer_params=p.prefill("kept", 10, [5, 2, 9]))
    d.scheduler.on_new_request(kept)
    p.prefill("left", 10, [3, 4, 6])
    gone = set()
    for number in range(9):
        clock.now = 0.25 * number
        d.step()
        assert eventually(lambda number=number: len(heard) > number, pause=0.002)
        gone |= p.step().finished_sending
    assert gone == {"left"}


@pytest.mark.parametrize("asked", [[5, 2, 10], [2, 5, 9], [5, 9, 2], [2, 9, 1], [0, 5, 2], [2, 9], [9]])
def test_blocks_that_are_not_kept_cannot_be_read(engine, asked):
    """Neither another request's, nor its own in another place or order; the decode engine is told why."""
    p, d = engine("P"), engine("D")
    params = p.prefill("r", 10, [5, 2, 9])
    own, num_tokens = [1, 3, 4][: len(asked)], min(10, len(asked) * p.config.block_size)
    wrong = {"remote_block_ids": [asked], "remote_num_tokens": num_tokens, "remote_prompt_digest": None}
    d.take("mine", 10, {**params, **wrong}, blocks_of(*own))
    output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"mine"}
    assert output.invalid_block_ids == set(own)
    assert not any(one.any() for one in d.rows([1, 3, 4]))


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"block_size": 8}, "block_size is 4 here and 8 there"),
        ({"model_fingerprint": "another"}, "model is 'a model' here and 'another' there"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype is 'float32' here and 'bfloat16' there"),
        ({"num_kv_heads": 4}, "the caches differ"),
        ({"num_layers": 3}, "the caches differ: 2 layers"),
    ],
)
def test_engines_that_do_not_fit_are_told_what_differs(engine, differs, said, caplog):
    p, d = engine("P", **differs), engine("D")
    params = p.prefill("r", 10, [5, 2, 9])
    d.take("mine", 10, params, blocks_of(1, 3, 4))
    with caplog.at_level("WARNING", "minivllm"):
        output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"mine"}
    assert said in said_of(d, params)


def said_of(engine, params):
    """Why this engine cannot connect to that one."""
    with pytest.raises(RefusedError) as refusal:
        engine.worker._connect(params["remote_host"], params["remote_port"])
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    "prompt", [range(1, 11), range(9), [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]], ids=["other", "shorter", "swapped"]
)
def test_what_was_computed_of_another_prompt_is_refused_and_given_back(engine, prompt):
    p, d = engine("P"), engine("D")
    params = p.prefill("r", 10, [5, 2, 9])
    with pytest.raises(MinivllmError, match="of another prompt"):
        d.scheduler.on_new_request(Request("mine", prompt, max_tokens=4, kv_transfer_params=params))
    assert d.scheduler.has_pending_block_frees()
    d.step()
    assert p.step_until(lambda output: output.finished_sending).finished_sending == {"r"}
    longer = {**params, "remote_request_id": "s"}
    d.scheduler.on_new_request(Request("longer", range(14), max_tokens=4, kv_transfer_params=longer))


def test_other_tensor_parallel_sizes_are_refused_with_the_request(engine):
    p, d = engine("P"), engine("D")
    params = {**p.prefill("r", 10, [5, 2, 9]), "tp_size": 2}
    with pytest.raises(MinivllmError, match=r"tp_size 2, this engine 1"):
        d.take("mine", 10, params, blocks_of(1, 3, 4))


def test_a_prefill_engine_that_is_gone(engine):
    """Before the first connection, and after one that is kept: the load fails, and the step goes on."""
    p, d = engine("P"), engine("D")
    first, second = p.prefill("r", 10, [5, 2, 9]), p.prefill("s", 10, [3, 4, 6])
    d.take("mine", 10, first, blocks_of(1, 3, 4))
    d.step_until(lambda output: output.finished_recving)
    p.close()
    d.take("next", 10, second, blocks_of(5, 6, 7))
    output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"next"}
    assert output.invalid_block_ids == {5, 6, 7}


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "a\0b"])
def test_an_address_that_is_none_fails_its_own_load_only(engine, host):
    """The threads that talk to an engine serve other requests too."""
    p, d = engine("P"), engine("D")
    remote = replace(RemotePrefill.of(p.prefill("r", 10, [5, 2, 9]), 1), host=host)
    load = Load("mine", "r", 0, [5, 2, 9], [1, 3, 4])
    d.worker._engine(remote).read(load)
    wait_until(lambda: load.is_over)
    assert load.error


def test_what_cannot_be_sent_fails_its_own_load_only(engine):
    p, d = engine("P"), engine("D")
    p.prefill("another", 10, [6, 7, 8])  # a request has one reader: a load that fails releases its blocks
    told = p.prefill("r", 10, [5, 2, 9])
    unsendable = Load("mine", "another", 0, [1 << 70], [1])
    peer = d.worker._engine(RemotePrefill.of(told, 1))
    peer.read(unsendable)
    peer.tell(Release(["\ud800"]))
    d.take("next", 10, told, blocks_of(1, 3, 4))
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert "OverflowError" in (unsendable.error or "")
    wait_until(lambda: peer.is_idle)


def test_many_addresses_do_not_leave_many_threads(engine):
    p, d = engine("P"), engine("D")
    told = RemotePrefill.of(p.prefill("r", 10, [5, 2, 9]), 1)
    before = threading.active_count()
    for port in range(1, 2 * MOST_ENGINES):
        load = Load("mine", "r", 0, [5], [1])
        peer = d.worker._engine(replace(told, host="127.0.0.1", port=port))
        peer.read(load)
        wait_until(lambda load=load, peer=peer: load.is_over and peer.is_idle)
    wait_until(lambda: threading.active_count() <= before + 2 * MOST_ENGINES)


def wait_until(holds):
    assert eventually(holds, pause=0.002)


def test_a_damaged_transfer_is_noticed_and_read_again(engine, monkeypatch):
    """Once damaged, it is repeated; damaged each time, the load fails."""
    p, d = engine("P"), engine("D")
    fill, damages = Connection._fill, [1]

    def damaging(self, room):
        fill(self, room)
        if len(room) > 2 and damages[0] > 0:
            damages[0] -= 1
            room[2][70] ^= 4

    monkeypatch.setattr(Connection, "_fill", damaging)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    output = d.step_until(lambda output: output.finished_recving)
    assert not output.failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    damages[0] = 10
    d.take("next", 10, p.prefill("s", 10, [5, 2, 9]), blocks_of(5, 6, 7))
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"next"}


@pytest.mark.parametrize("frame", [0, 1])
def test_a_connection_cut_in_the_middle_is_made_anew(engine, monkeypatch, frame, a_frame_for_each_layer):
    p, d = engine("P"), engine("D")
    sent, cuts = Connection.send, [1]

    def cutting(self, message, *rest):
        if getattr(message, "layer", None) == frame and cuts[0]:
            cuts[0] -= 1
            self._socket.sendall(b"mKV1 and then nothing")
            self.close()
            raise TransferError("cut")
        sent(self, message, *rest)

    monkeypatch.setattr(Connection, "send", cutting)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))


def test_a_connection_that_died_meanwhile_is_no_try(engine, monkeypatch):
    """The kept one is dead, the next one is cut, the one after it serves."""
    p, d = engine("P"), engine("D")
    d.take("first", 4, p.prefill("a", 4, [5]), blocks_of(1))
    d.step_until(lambda output: output.finished_recving)
    (peer,) = d.worker._engines.values()
    peer._open["read"].close()
    sent, cuts = Connection.send, [1]

    def cutting(self, message, *rest):
        if isinstance(message, PieceSent) and cuts:
            cuts.pop()
            self.close()
            raise TransferError("cut")
        sent(self, message, *rest)

    monkeypatch.setattr(Connection, "send", cutting)
    d.take("second", 4, p.prefill("b", 4, [2]), blocks_of(3))
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert not cuts
    assert all_equal(d.rows([3]), p.rows([2]))


def test_a_decode_engine_that_dies_in_the_middle_leaves_the_lease_to_end(engine, monkeypatch, a_frame_for_each_layer):
    p, d, clock = engine("P", {"kv_lease_duration": 0.3}), engine("D"), Clock()
    monkeypatch.setattr(p.worker.kept._leases, "_clock", clock.monotonic)
    sent, reached = Connection.send, threading.Event()

    def slow(self, message, *rest):
        if getattr(message, "layer", None) == 1:
            reached.set()
            time.sleep(0.1)
        sent(self, message, *rest)

    monkeypatch.setattr(Connection, "send", slow)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    d.step()
    assert reached.wait(PATIENCE)
    d.close()
    clock.now = 0.3
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_after_a_reset_nothing_is_written(engine, monkeypatch, a_frame_for_each_layer):
    p, d = engine("P"), engine("D")
    held, sent = threading.Event(), Connection.send

    def send(self, message, *rest):
        if getattr(message, "layer", None) == 0:
            held.wait(PATIENCE)
        return sent(self, message, *rest)

    monkeypatch.setattr(Connection, "send", send)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    d.step()
    d.worker.reset()
    d.scheduler.start_over()
    held.set()
    time.sleep(0.1)
    assert not d.step().finished_recving
    assert not any(one.any() for one in d.rows([1, 3, 4]))


def test_after_a_failed_step_what_is_kept_is_still_kept(engine):
    """Whether the ranks had heard of it before or not."""
    p, d = engine("P"), engine("D")
    told = p.prefill("told", 10, [5, 2, 9])
    p.worker.reset()
    p.scheduler.start_over()
    p.step()
    d.take("mine", 10, told, blocks_of(1, 3, 4))
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    p.step_until(lambda output: output.finished_sending == {"told"})


def test_released_before_the_lease_begins_it_never_begins():
    """The client, and so the decode engine, may hear of a request's end before the ranks do."""
    kept = KeptBlocks(30.0)
    kept.end(["r"])
    assert kept.take_finished() == (set(), set())
    kept.grant({"r": [1, 2]})
    assert kept.take_finished() == ({"r"}, set())
    with pytest.raises(RefusedError, match="not kept"):
        kept.check("r")
    assert kept.take_finished() == (set(), set())


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"secret": "short"}, "at least 16 characters"),
        ({"hots": "x"}, "no setting 'hots'"),
        ({"host": "0.0.0.0"}, "other engines are told it"),
        ({"port": 70000}, "port is 70000"),
        ({"port": "5700"}, "port is '5700'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"layerwise": 1}, "layerwise is 1"),
    ],
)
def test_settings_that_cannot_work(extra, said):
    with pytest.raises(MinivllmError, match=said):
        create_connector(tcp_config("P", extra), KVConnectorRole.SCHEDULER)
    assert isinstance(create_connector(tcp_config("P"), KVConnectorRole.SCHEDULER), TCPConnector)


def test_without_a_secret_nothing_begins(monkeypatch):
    monkeypatch.delenv("MINIVLLM_KV_TRANSFER_SECRET", raising=False)
    config = tcp_config("P", {"secret": None})
    with pytest.raises(MinivllmError, match="MINIVLLM_KV_TRANSFER_SECRET"):
        create_connector(config, KVConnectorRole.WORKER)


def test_a_port_that_is_taken(engine):
    port = engine("P").worker.get_handshake_metadata()["port"]
    with pytest.raises(MinivllmError, match=rf"cannot listen on 127.0.0.1:{port}"):
        engine("Q", {"port": port})
