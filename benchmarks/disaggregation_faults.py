"""Kill or freeze one of two servers, the proxy, the wire between them or the client, and see what
happens to a request.

    uv run python benchmarks/disaggregation_faults.py --json benchmarks/results/disaggregation_faults.cpu.json
    uv run python benchmarks/disaggregation_faults.py --only "in the transfer" --policies recompute

Two `minivllm serve` processes use TCPConnector with a lease of two seconds. `minivllm proxy` stands
in front of them, and between them is a wire that can be made to fail. In each row of `FAULTS`, one
thing goes wrong while one streamed request is at a known moment. Recorded are what the client got
and how long after the fault; and, one second after the lease's end, each survivor's share of held
blocks, its unfinished requests, and whether it answers a direct request as before. The table is
followed by one line of JSON. The exit code is 1 unless every row ends as `FAULTS` says, with text
that begins like the single server's, nothing held, and survivors that answer.
"""

import argparse
import json
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil
from faulty_wire import Front, Wire

from minivllm.config import EMBEDDED_MODEL
from minivllm.kv_connector.tcp.settings import SECRET_VARIABLE
from minivllm_lab.cli import benchmark_parser, run
from minivllm_lab.disaggregation.server_pair import MinivllmProcess, end_all, free_ports
from minivllm_lab.engines.http_load import post
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import table

PREFILL, DECODE, PROXY = "prefill", "decode", "proxy"
POLICIES = ("fail", "recompute")
WHOLE, ERROR, LOST, LEFT, STUCK = "whole", "error", "connection lost", "left", "never ends"
LEASE, A_WHILE = 2.0, 4.0
NO_MOMENT, BEFORE = "", "before it is asked"
WORKS, HAS_ANSWERED = "while the prefiller has it", "before the transfer"
WAITS, LOADS, DECODES = "while the decoder has it waiting", "in the transfer", "while the decoder decodes"


@dataclass(frozen=True)
class Fault:
    """A fault: what fails, when and how, and what the client should get under each of
    `POLICIES`.
    """

    what: str
    when: str
    act: "Callable[[Rig], None]"
    wanted: tuple[str, str]

    @property
    def name(self) -> str:
        """The fault and its moment in words."""
        return f"{self.what} {self.when}".strip()


FAULTS = (
    # what, when, how                                                                   with "fail", with "recompute"
    Fault("nothing", NO_MOMENT, lambda rig: None, (WHOLE, WHOLE)),
    Fault("prefiller killed", BEFORE, lambda rig: rig.kill(PREFILL), (ERROR, ERROR)),
    Fault("prefiller killed", WORKS, lambda rig: rig.kill(PREFILL), (ERROR, ERROR)),
    Fault("prefiller killed", HAS_ANSWERED, lambda rig: rig.kill(PREFILL), (ERROR, WHOLE)),
    Fault("prefiller killed", LOADS, lambda rig: rig.kill(PREFILL), (ERROR, WHOLE)),
    Fault("prefiller killed", DECODES, lambda rig: rig.kill(PREFILL), (WHOLE, WHOLE)),
    Fault("prefiller hangs", WORKS, lambda rig: rig.freeze(PREFILL), (ERROR, ERROR)),
    Fault("prefiller hangs", LOADS, lambda rig: rig.freeze(PREFILL), (ERROR, WHOLE)),
    Fault("decoder killed", WAITS, lambda rig: rig.kill(DECODE), (ERROR, ERROR)),
    Fault("decoder killed", LOADS, lambda rig: rig.kill(DECODE), (ERROR, ERROR)),
    Fault("decoder killed", DECODES, lambda rig: rig.kill(DECODE), (ERROR, ERROR)),
    Fault("decoder hangs", LOADS, lambda rig: rig.freeze(DECODE), (ERROR, ERROR)),
    Fault("decoder hangs", DECODES, lambda rig: rig.freeze(DECODE), (ERROR, ERROR)),
    Fault("decoder hangs for 4 s", WAITS, lambda rig: rig.freeze_for_a_while(DECODE), (ERROR, WHOLE)),
    Fault("decoder hangs for 4 s", LOADS, lambda rig: rig.freeze_for_a_while(DECODE), (ERROR, WHOLE)),
    Fault("proxy killed", WORKS, lambda rig: rig.kill(PROXY), (LOST, LOST)),
    Fault("proxy killed", LOADS, lambda rig: rig.kill(PROXY), (LOST, LOST)),
    Fault("proxy killed", DECODES, lambda rig: rig.kill(PROXY), (LOST, LOST)),
    Fault("proxy hangs for 4 s", WORKS, lambda rig: rig.freeze_proxy_past_the_lease(), (ERROR, WHOLE)),
    Fault("client leaves", WORKS, lambda rig: rig.client.leave(), (LEFT, LEFT)),
    Fault("client leaves", WAITS, lambda rig: rig.client.leave(), (LEFT, LEFT)),
    Fault("client leaves", LOADS, lambda rig: rig.client.leave(), (LEFT, LEFT)),
    Fault("client leaves", DECODES, lambda rig: rig.client.leave(), (LEFT, LEFT)),
    Fault("transfer cut once", NO_MOMENT, lambda rig: rig.spoil("cut", 1), (WHOLE, WHOLE)),
    Fault("transfer cut each time", NO_MOMENT, lambda rig: rig.spoil("cut"), (ERROR, WHOLE)),
    Fault("transfer stands still", NO_MOMENT, lambda rig: rig.spoil("hold"), (ERROR, WHOLE)),
    Fault("100 bytes lost once", NO_MOMENT, lambda rig: rig.spoil("lose", 1), (WHOLE, WHOLE)),
    Fault("100 bytes lost each time", NO_MOMENT, lambda rig: rig.spoil("lose"), (ERROR, WHOLE)),
    Fault("a bit flipped once", NO_MOMENT, lambda rig: rig.spoil("flip", 1), (WHOLE, WHOLE)),
    Fault("a bit flipped each time", NO_MOMENT, lambda rig: rig.spoil("flip"), (ERROR, WHOLE)),
)  # fmt: skip

FLAGS = ("--max-model-len", "2048", "--num-gpu-blocks-override", "200")
SECONDS_TO_END = 40.0
PROMPT_TOKENS, MAX_TOKENS = 400, 16
LONG_ANSWER = 1000
"""Tokens that take so long that it is under way when something goes wrong."""
MIDDLE = 200_000
"""Bytes after which the wire fails: a quarter of this prompt's keys and values."""
UNFINISHED = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Client:
    """A streamed request in a thread: its text, its outcome (`got`) and the error message
    (`words`).
    """

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.text, self.got, self.words = "", STUCK, ""
        self.ended, self.has_text, self._has_left = 0.0, threading.Event(), False
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(post("/v1/completions", {**body, "stream": True}))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Close the connection."""
        self._has_left = True
        self._socket.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until the request has ended, up to a time limit."""
        self._thread.join(SECONDS_TO_END)
        self.ended = self.ended or time.monotonic()

    def _read(self) -> None:
        with suppress(OSError), self._socket, self._socket.makefile("rb") as lines:
            head = lines.readline()
            self._take(lines if b" 200 " in head else [b"data: " + lines.read().rpartition(b"\r\n")[2]])
        if self.got == STUCK:
            self.got = LEFT if self._has_left else LOST
        self.ended = time.monotonic()

    def _take(self, lines: Any) -> None:
        for line in lines:
            said = line.removeprefix(b"data: ").strip()
            if said == b"[DONE]":
                self.got = ERROR if self.words else WHOLE
            elif line.startswith(b"data: {"):
                self._take_event(json.loads(said))

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.got, self.words = ERROR, event["error"]["message"]
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.has_text.set()


class Rig:
    """Both servers, the proxy and both wires under one policy; a process that died is restarted for
    the next row.
    """

    client: Client

    def __init__(self, policy: str) -> None:
        self.policy, self.wire = policy, Wire()
        self.ports: dict[str, int] = dict(zip((PREFILL, DECODE, PROXY), free_ports(3), strict=True))
        self.front = Front(self.ports[PREFILL], self.wire)
        self.running: dict[str, MinivllmProcess] = {}
        self.environment = os.environ | {SECRET_VARIABLE: secrets.token_hex(16), "OMP_NUM_THREADS": "1"}

    def make_whole(self) -> None:
        """Repair the wires, and start every process that is not running."""
        self.wire.mend()
        self.front.mend()
        for name, port in self.ports.items():
            if name not in self.survivors:
                command = (*self._command(name), "--port", str(port))
                self.running[name] = MinivllmProcess(command, self.environment)
        for name, port in self.ports.items():
            self.running[name].wait_until_ready(port)  # the proxy, once it finds both

    def _command(self, name: str) -> tuple[str, ...]:
        if name == PROXY:
            addresses = ("--prefill", url(self.front.port), "--decode", url(self.ports[DECODE]))
            return ("proxy", *addresses, "--health-interval", "0.2")
        settings = {
            "kv_connector": "TCPConnector",
            "kv_role": "kv_producer" if name == PREFILL else "kv_consumer",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"kv_lease_duration": LEASE, "timeout": 2.0},
        }
        return ("serve", str(EMBEDDED_MODEL), *FLAGS, "--kv-transfer-config", json.dumps(settings))

    @property
    def survivors(self) -> list[str]:
        """The servers and the proxy that are still running."""
        return [name for name, one in self.running.items() if one.process.poll() is None]

    def prepare(self, moment: str) -> None:
        """Set things up so that the next request stops at this moment."""
        if moment in (WORKS, WAITS):
            self._core(PREFILL if moment == WORKS else DECODE).suspend()
        if moment in (HAS_ANSWERED, LOADS):
            self.wire.fail(0 if moment == HAS_ANSWERED else MIDDLE, "hold")

    def wait_for(self, moment: str) -> None:
        """Wait until the request reaches the moment; raise `RuntimeError` if it never does."""
        events = {
            WORKS: self.front.asked,
            WAITS: self.front.answered,
            HAS_ANSWERED: self.wire.reached,
            LOADS: self.wire.reached,
            DECODES: self.client.has_text,
        }
        if moment in events:
            if not events[moment].wait(SECONDS_TO_END):
                raise RuntimeError(f"the request never reached the moment {moment!r}")
            time.sleep(0.3 if moment != DECODES else 0.0)

    def let_go(self) -> None:
        """Resume everything that was paused."""
        self.wire.opened.set()
        for name in self.survivors:
            self._resume(name)

    def kill(self, name: str) -> None:
        """Kill a server or the proxy."""
        for one in self._family(name):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.running[name].process.wait()
        self._resume_cores()

    def freeze(self, name: str) -> None:
        """Pause a process and its children."""
        for one in self._family(name):
            one.suspend()

    def freeze_for_a_while(self, name: str) -> None:
        """Pause a process for longer than the lease, then resume it."""
        self.freeze(name)
        time.sleep(A_WHILE)
        self._resume(name)

    def freeze_proxy_past_the_lease(self) -> None:
        """Let the prefill server answer, and resume the proxy only after the lease has expired."""
        self.freeze(PROXY)
        self._resume_cores()
        time.sleep(A_WHILE)
        self._resume(PROXY)

    def spoil(self, kind: str, times: int | None = None) -> None:
        """Make the wire fail in the middle of the transfer, `times` times, or every time if None."""
        self.wire.fail(MIDDLE, kind, times)

    def _resume(self, name: str) -> None:
        for one in self._family(name):
            one.resume()

    def _resume_cores(self) -> None:
        for name in (PREFILL, DECODE):
            if name in self.survivors:
                self._core(name).resume()

    def _family(self, name: str) -> list[psutil.Process]:
        own = psutil.Process(self.running[name].process.pid)
        return [own, *own.children(recursive=True)]

    def _core(self, name: str) -> psutil.Process:
        return next(one for one in self._family(name) if "minivllm.engine.core_proc" in one.cmdline())

    def close(self) -> None:
        """Stop all processes."""
        self.let_go()
        end_all(list(self.running.values()))


@dataclass
class Row:
    """The outcome of a fault. `held` and `unfinished` are the survivors' shares of held blocks and
    numbers of unfinished requests; `answers` says whether they answer as before.
    """

    fault: str
    policy: str
    wanted: str
    got: str
    words: str
    seconds: float
    text_is_right: bool
    held: dict[str, float]
    unfinished: dict[str, float]
    answers: dict[str, bool]

    @property
    def is_well(self) -> bool:
        """Return whether the client got what it should, nothing is left over, and the survivors answer."""
        left = [*self.held.values(), *self.unfinished.values()]
        is_clear = self.got != ERROR or bool(self.words)
        return (
            self.got == self.wanted and self.text_is_right and is_clear and not any(left) and all(self.answers.values())
        )


def played(fault: Fault, rig: Rig) -> Row:
    """Cause a fault, and return its outcome."""
    rig.make_whole()
    draw = random.Random(f"{fault.name} {rig.policy}")  # a prompt that no server has in its cache
    body = {"prompt": [draw.randrange(4, 800) for _ in range(PROMPT_TOKENS)], "temperature": 0, "ignore_eos": True}
    body["max_tokens"] = LONG_ANSWER if fault.when == DECODES else MAX_TOKENS
    servers = (PREFILL, DECODE)
    expected, known = answer(rig.ports[PREFILL], body), {name: short_answer(rig.ports[name]) for name in servers}
    rig.prepare(fault.when)
    is_before = fault.when in (NO_MOMENT, BEFORE)
    if is_before:
        fault.act(rig)
    rig.client = Client(rig.ports[PROXY], body)
    began = time.monotonic()
    if not is_before:
        rig.wait_for(fault.when)
        began = time.monotonic()
        fault.act(rig)
    rig.client.join()
    rig.let_go()
    time.sleep(LEASE + 1)
    names = [name for name in servers if name in rig.survivors]
    metrics = {name: metrics_of(rig.ports[name]) for name in names}
    wanted = fault.wanted[POLICIES.index(rig.policy)]
    return Row(
        fault=fault.name,
        policy=rig.policy,
        wanted=wanted,
        got=rig.client.got,
        words=rig.client.words,
        seconds=round(rig.client.ended - began, 2),
        text_is_right=rig.client.text == expected if wanted == WHOLE else expected.startswith(rig.client.text),
        held={name: metrics[name]["vllm:kv_cache_usage_perc"] for name in names},
        unfinished={name: sum(metrics[name][metric] for metric in UNFINISHED) for name in names},
        answers={name: short_answer(rig.ports[name]) == known[name] for name in names},
    )


def url(port: int) -> str:
    """Return the address of a server on this machine."""
    return f"http://127.0.0.1:{port}"


def answer(port: int, body: dict[str, Any]) -> str:
    """Return a server's answer to a direct request."""
    return httpx.post(f"{url(port)}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]


def short_answer(port: int) -> str | None:
    """Return a server's answer to a short prompt, or None if there is none."""
    try:
        return answer(port, {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 8})
    except (httpx.TransportError, KeyError):
        return None


def metrics_of(port: int) -> dict[str, float]:
    """Return a server's metrics by name; of several with the same name, the last one counts."""
    lines = httpx.get(f"{url(port)}/metrics", timeout=20).text.splitlines()
    return {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def show(rows: list[Row]) -> None:
    """Print a row for each fault: what the client got under each policy, and the error message."""
    found = {(row.fault, row.policy): row for row in rows}
    policies = [policy for policy in POLICIES if any(row.policy == policy for row in rows)]
    words = list(dict.fromkeys(row.words for row in rows if row.words))
    cells = [
        (name, *(cell(found.get((name, policy)), words) for policy in policies))
        for name in dict.fromkeys(row.fault for row in rows)
    ]
    table("What the client gets, and how many seconds after the fault", ["what goes wrong", *policies], cells)
    for number, said in enumerate(words, 1):
        print(f"{number}  {said}")


def cell(row: Row | None, words: list[str]) -> str:
    """Format a client's outcome, marking a wrong one."""
    if row is None:
        return ""
    number = f" {words.index(row.words) + 1}" if row.words else ""
    wrong = "" if row.is_well else f" WRONG: {row}"
    return f"{row.got}{number}, {row.seconds:.1f}{wrong}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """Count rows, correct rows, rows that left blocks held, and the client's outcomes by policy."""
    return {
        "rows": len(rows),
        "well": sum(row.is_well for row in rows),
        "with_blocks_held": sum(any(row.held.values()) for row in rows),
        "longest_seconds": max(row.seconds for row in rows),
        **{policy: dict(Counter(row.got for row in rows if row.policy == policy)) for policy in POLICIES},
    }


def main(arguments: argparse.Namespace) -> None:
    """Cause all faults, and exit with 1 if one ends badly."""
    rows = list[Row]()
    for policy in arguments.policies.split(","):
        with closing(Rig(policy)) as rig:
            for fault in track([one for one in FAULTS if arguments.only in one.name], policy):
                rows.append(played(fault, rig))
                print(rows[-1], file=sys.stderr, flush=True)
    show(rows)
    figures = {"summary": summary(rows), "rows": [asdict(row) for row in rows]}
    result = record("disaggregation_faults", figures, lease_seconds=LEASE)
    report(result, arguments.json)
    if not all(row.is_well for row in rows):
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--only", default="", help="only faults whose names contain this")
    flags.add_argument("--policies", default=",".join(POLICIES), help="fail, recompute, or both (the default)")
    return flags


if __name__ == "__main__":
    run(main, parser())
