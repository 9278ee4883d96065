"""Test the faulty wire, and which outcomes count as good."""

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "disaggregation_faults.cpu.json"
DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def faulty_wire(load_benchmark):
    return load_benchmark("faulty_wire")


class Sender:
    """A server that sends the same bytes to each client."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            with connection:
                connection.sendall(DATA)


def received(port: int, seconds: float = 5.0) -> bytes:
    """Return what a new connection receives until it ends or falls silent."""
    data = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        try:
            while piece := connection.recv(4096):
                data += piece
        except TimeoutError:
            pass
    return data


def test_a_wire_fails_as_often_as_it_should_and_then_passes_all(faulty_wire):
    wire = faulty_wire.Wire(Sender().port)
    assert received(wire.port) == DATA
    wire.fail(5000, "flip", 1)
    flipped = received(wire.port)
    assert [(byte ^ other).bit_count() for byte, other in zip(flipped, DATA, strict=True) if byte != other] == [1]
    assert received(wire.port) == DATA
    wire.fail(5000, "lose")
    assert [len(DATA) - len(received(wire.port)) for _ in range(2)] == [faulty_wire.LOST_BYTES] * 2
    wire.fail(5000, "cut")
    assert len(received(wire.port)) < len(DATA)
    wire.fail(0, "hold")
    assert received(wire.port, 0.2) == b""
    assert wire.reached.is_set()
    wire.mend()
    assert received(wire.port) == DATA


def test_the_front_says_that_keys_and_values_are_at_the_wire(faulty_wire):
    wire = faulty_wire.Wire()
    front = faulty_wire.Front(0, wire)
    told = b'{"remote_port":54321,"tp_size":1}'
    assert front.down(told, 0) == told.replace(b"54321", str(wire.port).encode())
    assert wire.target == 54321
    assert front.answered.is_set()
    assert front.down(b'{"remote_port":null}', 0) == b'{"remote_port":null}'


@pytest.mark.parametrize(
    "changed",
    [
        {"got": "whole"}, {"text_is_right": False}, {"words": ""}, {"held": {"decode": 0.01}},
        {"unfinished": {"decode": 1.0}}, {"answers": {"decode": False}},
    ],
)  # fmt: skip
def test_only_what_is_as_it_should_be_is_well(bench, changed):
    well = bench.Row(
        "f", "fail", "error", "error", "why", 0.1, True, {"decode": 0.0}, {"decode": 0.0}, {"decode": True}
    )
    assert well.is_well
    assert not replace(well, **changed).is_well


def test_the_committed_table_has_every_fault_and_all_end_well(bench):
    rows = [bench.Row(**row) for row in json.loads(RESULT.read_text())["figures"]["rows"]]
    wanted = {
        (fault.name, policy): want
        for fault in bench.FAULTS
        for policy, want in zip(bench.POLICIES, fault.wanted, strict=True)
    }
    assert {(row.fault, row.policy): row.wanted for row in rows} == wanted
    assert all(row.is_well for row in rows)
