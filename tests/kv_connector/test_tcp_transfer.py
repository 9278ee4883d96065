"""Test both sides of two TCP connectors, step by step, over real sockets: pieces, damage, and
incompatible engines.

What also holds for NIXL's connector is in `test_pull_transfer.py`.
"""

import threading
import time

import pytest
import torch
from kv_connector.pull_doubles import Clock, all_equal, blocks_of
from kv_connector.tcp_doubles import tcp_config, tcp_engines
from patience import PATIENCE
from refusals import assert_refused

from minivllm.core.kv_connector import KVConnectorRole
from minivllm.kv_connector.factory import create_connector
from minivllm.kv_connector.tcp import worker as tcp_worker
from minivllm.kv_connector.tcp.protocol import Connection
from minivllm.kv_connector.tcp.scheduler import TCPConnectorScheduler


@pytest.fixture
def one_block_a_frame(monkeypatch):
    """Send small transfers in several frames."""
    monkeypatch.setattr(tcp_worker, "PIECE_BYTES", 1)


@pytest.fixture
def engine(monkeypatch):
    """Yield a function that makes engines, and close them before `monkeypatch` is undone."""
    with tcp_engines() as make:
        yield make


def test_scales_of_a_quantized_cache_arrive_and_bytes_are_counted(engine, monkeypatch):
    monkeypatch.setattr("kv_connector.tcp_doubles.make_caches", int8_caches)
    p, d = engine("P"), engine("D")
    assert not d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    assert d.worker.get_kv_connector_stats()["tcp_bytes_transferred"] == [3 * d.worker.regions.record_bytes]


def int8_caches(config, fill):
    shape = (config.num_gpu_blocks, config.block_size, 2, 8)
    scales = (config.num_gpu_blocks, 2, config.block_size)
    low, high = (1, 99) if fill else (0, 1)
    kinds = [(shape, torch.int8)] * 2 + [(scales, torch.float32)] * 2
    return {
        f"layer {layer}": tuple(torch.randint(low, high, size).to(dtype) for size, dtype in kinds) for layer in range(2)
    }


@pytest.mark.parametrize("piece_bytes", [1, 5000])
def test_many_pieces_of_many_requests_at_once(engine, monkeypatch, piece_bytes):
    """Pieces have one block, or four with fewer in a transfer's last piece."""
    monkeypatch.setattr(tcp_worker, "PIECE_BYTES", piece_bytes)
    p, d = engine("P"), engine("D", num_gpu_blocks=24)
    orders = {f"r{index}": (list(range(1, 1 + index)), list(range(22, 22 - index, -1))) for index in range(1, 6)}
    for name, (peer, here) in orders.items():
        d.load(f"my {name}", 4 * len(peer), p.prefill(name, 4 * len(peer), peer), *here)
        assert all_equal(d.rows(here), p.rows(peer))


@pytest.mark.parametrize("asked", [[5, 2, 10], [5, 9, 2], [2, 9]])
def test_blocks_that_are_not_kept_cannot_be_read(p, d, asked):
    """Another request's blocks are refused, and so are its own in another place or order; the
    decode engine is told why.
    """
    params = p.prefill("r", 10, [5, 2, 9])
    own, num_tokens = [1, 3, 4][: len(asked)], min(10, len(asked) * p.config.block_size)
    wrong = {"remote_block_ids": [asked], "remote_num_tokens": num_tokens, "remote_prompt_digest": None}
    d.admit(d.take("mine", 10, {**params, **wrong}), blocks_of(*own))
    assert d.step_until(lambda output: output.finished_recving).failed_recving == {"mine"}
    assert not any(row.any() for row in d.rows([1, 3, 4]))


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"block_size": 8}, "block_size is 8 here and 4 there"),
        ({"model_fingerprint": "another"}, "model is another here and a model there"),
        ({"device": "cuda"}, "kv_cache_layout is NHD here and HND there"),
        ({"shape": {"num_kv_heads": 4}}, "the cache is 2 layers of"),
        ({"shape": {"num_layers": 3}}, "the cache is 3 layers of"),
        ({"extra": {"secret": "known to both of them, nearly"}}, "different secrets (MINIVLLM_KV_TRANSFER_SECRET)"),
    ],
)
def test_engines_that_do_not_fit_are_told_what_differs_in_one_line(engine, differs, said, caplog):
    p, d = engine("P", **differs), engine("D")
    with caplog.at_level("WARNING", "minivllm"):
        assert d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving == {"mine"}
    (line,) = [record.getMessage() for record in caplog.records if "were not read" in record.getMessage()]
    assert said in line
    assert "\n" not in line
    assert not any(rows.any() for rows in d.rows([1, 3, 4]))


def test_an_address_that_is_none_fails_its_own_load_only(p, d):
    """The threads that talk to an engine also serve other requests."""
    params = p.prefill("r", 10, [5, 2, 9])
    d.admit(d.take("mine", 10, {**params, "remote_host": "a\0b", "remote_request_id": "s"}), blocks_of(6, 7, 8))
    d.admit(d.take("next", 10, params), blocks_of(1, 3, 4))
    failed, received = set(), set()
    while received != {"mine", "next"}:
        output = d.step_until(lambda output: output.finished_recving)
        failed |= output.failed_recving
        received |= output.finished_recving
    assert failed == {"mine"}
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))


def test_engines_that_do_not_answer_do_not_hold_up_heartbeats(p, d, monkeypatch):
    """They do not create threads without limit either: there are as many loads at once as readers."""
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
        d.admit(d.take(f"mine {index}", 4, dead), blocks_of(1))
    d.take("mine", 10, told)
    d.step()
    assert renewed.wait(PATIENCE)
    assert threading.active_count() <= before + tcp_worker.READERS + tcp_worker.TELLERS + tcp_worker.ANSWERERS
    held.set()


def test_a_damaged_transfer_is_noticed_and_read_again(p, d, monkeypatch):
    """A transfer damaged once is repeated; one damaged each time fails the load."""
    filled, damages = Connection._filled, [1]

    def damaging(self, room, until):
        filled(self, room, until)
        if len(room) == 3 * d.worker.regions.record_bytes and damages[0] > 0:
            damages[0] -= 1
            room[70] ^= 4
        return room

    monkeypatch.setattr(Connection, "_filled", damaging)
    assert not d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))
    damages[0] = 10
    assert d.load("next", 10, p.prefill("s", 10, [5, 2, 9]), 5, 6, 7).failed_recving == {"next"}


def begin_load(d, params):
    d.admit(d.take("mine", 10, params), blocks_of(1, 3, 4))
    d.step()


def before_piece(monkeypatch, at, act):
    """Call `act(connection)` before the prefill engine sends the piece with this number, counted
    from 0; None: before each.
    """
    sent, counted = Connection.send, []

    def send(self, body, refused=False):
        if isinstance(body, memoryview):
            counted.append(body)
            if at in (None, len(counted) - 1):
                act(self)
        sent(self, body, refused)

    monkeypatch.setattr(Connection, "send", send)


@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0" + bytes([0, 0, 4, 0]) + bytes(4) + b"a part of the block"])
def test_a_transfer_that_is_cut_short_is_read_again(p, d, monkeypatch, part, one_block_a_frame):
    """The cut comes between two frames, within a header, or within a body."""

    def cut(connection):
        connection._socket.sendall(part)
        connection.close()

    before_piece(monkeypatch, 1, cut)
    assert not d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving
    assert all_equal(d.rows([1, 3, 4]), p.rows([5, 2, 9]))


def test_a_transfer_that_is_cut_short_each_time_is_lost(p, d, monkeypatch, one_block_a_frame):
    before_piece(monkeypatch, None, Connection.close)
    assert d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving == {"mine"}
    assert d.worker.get_kv_connector_stats() == {"tcp_num_failed_transfers": 1}
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_a_lease_that_ends_in_the_middle_ends_the_transfer(p, d, monkeypatch, one_block_a_frame):
    """The blocks may be another request's by then, so what was gathered from them is not sent."""
    before_piece(monkeypatch, 1, lambda connection: p.worker.leases.end(["r"]))
    assert d.load("mine", 10, p.prefill("r", 10, [5, 2, 9]), 1, 3, 4).failed_recving == {"mine"}
    assert not any(row.any() for row in d.rows([4]))


def test_a_decode_engine_that_dies_in_the_middle_leaves_the_lease_to_end(engine, monkeypatch, one_block_a_frame):
    p, d, clock = engine("P", lease=0.3), engine("D"), Clock()
    monkeypatch.setattr(p.worker.leases, "_clock", clock.monotonic)
    reached = threading.Event()
    before_piece(monkeypatch, 1, lambda connection: (reached.set(), time.sleep(0.1)))
    begin_load(d, p.prefill("r", 10, [5, 2, 9]))
    assert reached.wait(PATIENCE)
    d.close()
    clock.now = 0.3
    p.step_until(lambda output: output.finished_sending == {"r"})


def test_after_a_reset_nothing_is_written(p, d, monkeypatch, one_block_a_frame):
    held = threading.Event()
    before_piece(monkeypatch, 0, lambda connection: held.wait(PATIENCE))
    begin_load(d, p.prefill("r", 10, [5, 2, 9]))
    d.fail_a_step()
    held.set()
    time.sleep(0.1)
    assert not d.step().finished_recving
    assert not any(row.any() for row in d.rows([1, 3, 4]))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"secret": "short"}, "at least 16 characters"),
        ({"secret": None}, "set MINIVLLM_KV_TRANSFER_SECRET"),
        ({"hots": "x"}, "no setting 'hots'"),
        ({"host": "0.0.0.0"}, "other engines connect to it"),
        ({"port": 70000}, "port is 70000"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_settings_that_cannot_work(extra, said, monkeypatch):
    monkeypatch.delenv("MINIVLLM_KV_TRANSFER_SECRET", raising=False)
    assert_refused(said, create_connector, tcp_config("P", extra), KVConnectorRole.SCHEDULER)
    assert isinstance(create_connector(tcp_config("P"), KVConnectorRole.SCHEDULER), TCPConnectorScheduler)


def test_a_port_that_is_taken(engine):
    port = engine("P").worker.get_handshake_metadata()
    assert_refused(rf"cannot listen on 127.0.0.1:{port}", engine, "Q", {"port": port})
