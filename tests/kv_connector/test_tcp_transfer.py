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
from minivllm.kv_connector.pull_scheduler import ReadOrder
from minivllm.kv_connector.tcp import worker as tcp_worker
from minivllm.kv_connector.tcp.protocol import Connection
from minivllm.kv_connector.tcp.scheduler import TCPConnectorScheduler


@pytest.fixture
def a_frame_for_each_block(monkeypatch):
    """So that small transfers have several."""
    monkeypatch.setattr(tcp_worker, "PIECE_BYTES", 1)


@pytest.fixture
def engine(monkeypatch):
    """Makes engines, and closes them afterwards: no thread is left, and none runs while `monkeypatch` is undone."""
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
        "remote_port": p.worker.get_handshake_metadata(),
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
    stats = d.worker.get_kv_connector_stats()
    assert stats["tcp_bytes_transferred"] == [3 * d.worker.regions.record_bytes]


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


@pytest.mark.parametrize("piece_bytes", [1, 2048, 5000])
def test_many_pieces_of_many_requests_at_once(engine, monkeypatch, piece_bytes):
    """Pieces of one, two or four blocks, so that a transfer has many frames, and its last piece fewer blocks."""
    monkeypatch.setattr(tcp_worker, "PIECE_BYTES", piece_bytes)
    p, d = engine("P"), engine("D", num_gpu_blocks=24)
    orders = {f"r{index}": (list(range(1, 1 + index)), list(range(22, 22 - index, -1))) for index in range(1, 6)}
    for name, (there, here) in orders.items():
        d.take(f"my {name}", 4 * len(there), p.prefill(name, 4 * len(there), there), blocks_of(*here))
        d.step_until(lambda output, name=name: f"my {name}" in output.finished_recving)
        assert all_equal(d.rows(here), p.rows(there))


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
    monkeypatch.setattr(p.worker.leases, "_clock", clock.monotonic)
    heard, renew = [], p.worker.leases.renew
    monkeypatch.setattr(p.worker.leases, "renew", lambda ids: renew(ids) or heard.append(ids))
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
        ({"block_size": 8}, "block_size is 8 here and 4 there"),
        ({"model_fingerprint": "another"}, "model is another here and a model there"),
        ({"num_kv_heads": 4}, "the cache is 2 layers of"),
        ({"num_layers": 3}, "the cache is 3 layers of"),
    ],
)
def test_engines_that_do_not_fit_are_told_what_differs(engine, differs, said, caplog):
    p, d = engine("P", **differs), engine("D")
    params = p.prefill("r", 10, [5, 2, 9])
    d.take("mine", 10, params, blocks_of(1, 3, 4))
    with caplog.at_level("WARNING", "minivllm"):
        output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"mine"}
    (line,) = [record.getMessage() for record in caplog.records if "were not read" in record.getMessage()]
    assert said in line
    assert "\n" not in line


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
    params = p.prefill("r", 10, [5, 2, 9])
    d.take("mine", 10, {**params, "remote_host": host, "remote_request_id": "s"}, blocks_of(6, 7, 8))
    d.take("next", 10, params, blocks_of(1, 3, 4))
    failed, received = set(), set()
    while received != {"mine", "next"}:
        output = d.step_until(lambda output: output.finished_recving)
        failed |= output.failed_recving
        received |= output.finished_recving
    assert failed == {"mine"}
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))


def test_what_cannot_be_sent_fails_its_own_load_only(engine):
    p, d = engine("P"), engine("D")
    told = p.prefill("r", 10, [5, 2, 9])
    unsendable = replace(RemotePrefill.of(told, 1), request_id="another", block_ids=(1 << 70,))
    with pytest.raises(OverflowError):
        d.worker._load(ReadOrder(unsendable, (1,), 0, 4))
    d.take("next", 10, told, blocks_of(1, 3, 4))
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))


def test_engines_that_do_not_answer_do_not_hold_up_heartbeats(engine, monkeypatch):
    """Nor do they make threads without end: there are as many loads at once as there are readers."""
    p, d = engine("P"), engine("D")
    held, connect = threading.Event(), tcp_worker.protocol.connect

    def connects(host, port, timeout):
        if port == 1:
            held.wait(PATIENCE)
        return connect(host, port, timeout)

    monkeypatch.setattr(tcp_worker.protocol, "connect", connects)
    told = p.prefill("r", 10, [5, 2, 9])
    renewed = threading.Event()
    monkeypatch.setattr(p.worker.leases, "renew", lambda ids: renewed.set())
    before = threading.active_count()
    for index in range(2 * tcp_worker.READERS):
        dead = {**told, "remote_port": 1, "remote_request_id": f"dead {index}", "remote_prompt_digest": None}
        d.take(f"mine {index}", 4, dead, blocks_of(1))
    d.scheduler.on_new_request(Request("mine", range(10), max_tokens=4, kv_transfer_params=told))
    d.step()
    assert renewed.wait(PATIENCE)
    assert threading.active_count() <= before + tcp_worker.READERS + tcp_worker.TELLERS + tcp_worker.ANSWERERS
    held.set()


def wait_until(holds):
    assert eventually(holds, pause=0.002)


def test_a_damaged_transfer_is_noticed_and_read_again(engine, monkeypatch):
    """Once damaged, it is repeated; damaged each time, the load fails."""
    p, d = engine("P"), engine("D")
    filled, damages = Connection._filled, [1]

    def damaging(self, room, until):
        filled(self, room, until)
        if len(room) == 3 * d.worker.regions.record_bytes and damages[0] > 0:
            damages[0] -= 1
            room[70] ^= 4
        return room

    monkeypatch.setattr(Connection, "_filled", damaging)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    output = d.step_until(lambda output: output.finished_recving)
    assert not output.failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    damages[0] = 10
    d.take("next", 10, p.prefill("s", 10, [5, 2, 9]), blocks_of(5, 6, 7))
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"next"}


def pieces_sent(monkeypatch, at, act):
    """Has `act(connection)` called before the prefill engine sends the piece with this number, from 0 on."""
    sent, counted = Connection.send, []

    def send(self, body, refused=False):
        if isinstance(body, memoryview):
            counted.append(body)
            if len(counted) == at + 1:
                act(self)
        sent(self, body, refused)

    monkeypatch.setattr(Connection, "send", send)


@pytest.mark.parametrize("piece", [0, 1, 2])
@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0" + bytes([0, 0, 4, 0]) + bytes(4) + b"a part of the block"])
def test_a_transfer_that_is_cut_short_is_read_again(engine, monkeypatch, piece, part, a_frame_for_each_block):
    """Between two frames, within a header, within a body."""
    p, d = engine("P"), engine("D")

    def cut(connection):
        connection._socket.sendall(part)
        connection.close()

    pieces_sent(monkeypatch, piece, cut)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    assert not d.step_until(lambda output: output.finished_recving).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))


def test_a_transfer_that_is_cut_short_each_time_is_lost(engine, monkeypatch, a_frame_for_each_block):
    p, d = engine("P"), engine("D")

    def send(self, body, refused=False, sent=Connection.send):
        if isinstance(body, memoryview):
            self.close()
        sent(self, body, refused)

    monkeypatch.setattr(Connection, "send", send)
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"mine"}
    assert output.invalid_block_ids == {1, 3, 4}
    assert d.worker.get_kv_connector_stats() == {"tcp_num_failed_transfers": 1}
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_a_lease_that_ends_in_the_middle_ends_the_transfer(engine, monkeypatch, a_frame_for_each_block):
    """The blocks may be another request's, so what was gathered of them is not sent."""
    p, d = engine("P"), engine("D")
    pieces_sent(monkeypatch, 1, lambda connection: p.worker.leases.end(["r"]))
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"mine"}
    assert not any(one.any() for one in d.rows([4]))


def test_a_decode_engine_that_dies_in_the_middle_leaves_the_lease_to_end(engine, monkeypatch, a_frame_for_each_block):
    p, d, clock = engine("P", {"kv_lease_duration": 0.3}), engine("D"), Clock()
    monkeypatch.setattr(p.worker.leases, "_clock", clock.monotonic)
    reached = threading.Event()
    pieces_sent(monkeypatch, 1, lambda connection: (reached.set(), time.sleep(0.1)))
    d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
    d.step()
    assert reached.wait(PATIENCE)
    d.close()
    clock.now = 0.3
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_after_a_reset_nothing_is_written(engine, monkeypatch, a_frame_for_each_block):
    p, d = engine("P"), engine("D")
    held = threading.Event()
    pieces_sent(monkeypatch, 0, lambda connection: held.wait(PATIENCE))
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


def test_released_before_the_lease_begins_it_never_begins(engine):
    """The client, and so the decode engine, may hear of a request's end before the ranks do."""
    p = engine("P")
    p.worker.leases.end(["r"])
    assert p.prefill("r", 10, [5, 2, 9])
    assert p.worker.leases.blocks_of("r") is None
    assert not p.scheduler.is_held("r")


@pytest.mark.parametrize("secret", ["something else entirely", "known to both of them, nearly"])
def test_another_secret_is_refused_in_one_line(engine, caplog, secret):
    p, d = engine("P"), engine("D", {"secret": secret})
    with caplog.at_level("WARNING", "minivllm"):
        d.take("mine", 10, p.prefill("r", 10, [5, 2, 9]), blocks_of(1, 3, 4))
        output = d.step_until(lambda output: output.finished_recving)
    assert output.failed_recving == {"mine"}
    (line,) = [record.getMessage() for record in caplog.records if "were not read" in record.getMessage()]
    assert line.endswith("this engine has another secret (MINIVLLM_KV_TRANSFER_SECRET)")
    assert not any(one.any() for one in d.rows([1, 3, 4]))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"secret": "short"}, "at least 16 characters"),
        ({"hots": "x"}, "no setting 'hots'"),
        ({"host": "0.0.0.0"}, "other engines are told it"),
        ({"port": 70000}, "port is 70000"),
        ({"port": "5700"}, "port is '5700'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"layerwise": True}, "no setting 'layerwise'"),
    ],
)
def test_settings_that_cannot_work(extra, said):
    with pytest.raises(MinivllmError, match=said):
        create_connector(tcp_config("P", extra), KVConnectorRole.SCHEDULER)
    assert isinstance(create_connector(tcp_config("P"), KVConnectorRole.SCHEDULER), TCPConnectorScheduler)


def test_without_a_secret_nothing_begins(monkeypatch):
    monkeypatch.delenv("MINIVLLM_KV_TRANSFER_SECRET", raising=False)
    config = tcp_config("P", {"secret": None})
    with pytest.raises(MinivllmError, match="MINIVLLM_KV_TRANSFER_SECRET"):
        create_connector(config, KVConnectorRole.WORKER)


def test_a_port_that_is_taken(engine):
    port = engine("P").worker.get_handshake_metadata()
    with pytest.raises(MinivllmError, match=rf"cannot listen on 127.0.0.1:{port}"):
        engine("Q", {"port": port})
