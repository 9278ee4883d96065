"""Lesson 06's measurements on servers, its tables, its figure and its command line.

A function `measure_*` measures, prints its table and returns its figures; what it takes as a callable or as a class is
code of the lesson.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.core import EngineCore
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import curves, named_bars, panels
from minivllm_lab.http_load import Answer, Ask, answers_of, load, start_load
from minivllm_lab.progress import track
from minivllm_lab.serving.request_trace import Trace
from minivllm_lab.serving.stage import RealServer, Stage
from minivllm_lab.tables import Timed, closing, console, ms, table
from minivllm_simulate.deployments import Deployment, bubble, bytes_sent, find_knee, serve
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.lever_checks import published_checks
from minivllm_simulate.virtual_clock import percentile

__all__ = ["Stage"]
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
COMPLETIONS = "/v1/completions"
SECONDS_UNREAD = {True: 0.8, False: 1.5}
"""How long the slow client does not read, by `--quick`."""
NUM_LEAVING, TOKENS_OF_LEAVING = 6, 200
GPUS, GPU, MODEL = 4, "H100", "Llama-3.1-8B"
TTFT_SLO, TPOT_SLOS = 0.5, {"tight": 0.0075, "loose": 0.010}
"""Seconds, of the modelled deployments."""
KNEES = 1, 241
"""Requests a second, between which their knees are sought."""


# ---- requests --------------------------------------------------------------------------------------------------------


def prompts(count: int, seed: int) -> list[list[int]]:
    """Token ids of so many prompts that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(300, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def to_lesson(token_ids: Sequence[int], max_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """A request's body for the lesson's servers."""
    return {"prompt": {"prompt_token_ids": list(token_ids)}, "max_tokens": max_tokens}


def to_real(token_ids: Sequence[int], max_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """The same for the real server."""
    return {"prompt": list(token_ids), "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}


def load_real(real: RealServer, rate: float, seconds: float, seed: int) -> list[Answer]:
    """Offer requests at this rate to the real server, at random times, for so long; all are answered."""
    draw, at, asks = random.Random(seed), 0.0, []
    for token_ids in prompts(max(8, round(rate * seconds)), seed):
        at += draw.expovariate(rate)
        asks.append(Ask(to_real(token_ids), at))
    return load(real.port, asks, path=COMPLETIONS)


# ---- 1. one request --------------------------------------------------------------------------------------------------


def measure_trace(real: RealServer, requests: int = 7) -> dict:
    """One request alone at a time; of `requests`, the one whose first token took the median time, hop by hop."""
    asks = [Ask(to_real(token_ids, 16)) for token_ids in prompts(requests + 3, seed=1)]
    load(real.port, asks[:3], clients=1, path=COMPLETIONS)
    found = []
    for one in asks[3:]:
        with Trace() as trace:
            (answer,) = load(real.port, [one], clients=1, path=COMPLETIONS)
        found.append((answer, trace.hops()))
    answer, hops = sorted(found, key=lambda pair: pair[0].ttft)[requests // 2]
    marks = [("the client is connected", answer.connected), *hops, ("the client has the first event", answer.events[0])]
    at = {name: seconds - answer.sent for name, seconds in marks}
    since = [0.0, *at.values()]
    rows = [(name, ms(t), ms(t - before)) for (name, t), before in zip(at.items(), since, strict=False)]
    last = answer.latency
    caption = f"and {len(answer.events) - 1} events later, at {ms(last)} ms, the last"
    table("From a POST to its first token", ("hop", "at, ms", "since the one before"), rows, caption)
    inside = at["the text is in its collector"] - at["its JSON is checked"]
    return {
        "at_ms": {name: 1e3 * seconds for name, seconds in at.items()},
        "ttft_ms": 1e3 * answer.ttft,
        "server_ttft_ms": 1e3 * inside,
        "e2e_ms": 1e3 * last,
        "events": len(answer.events),
        "core_share": (at["the step's outputs are back"] - at["a step of the core begins"]) / answer.ttft,
    }


# ---- 2. where the core runs ------------------------------------------------------------------------------------------


def measure_places(ports: Mapping[str, int], arguments: argparse.Namespace) -> dict:
    """The same closed load on the lesson's server, by where its core runs."""
    clients = min(4, arguments.clients) if arguments.quick else arguments.clients
    count, found, rows = clients if arguments.quick else 6 * clients, {}, []
    asks = [Ask(to_lesson(token_ids)) for token_ids in prompts(count + 1, arguments.seed)]
    for place, port in track(ports.items(), "loading"):
        load(port, asks[:1], clients=1)
        answers = load(port, asks[1:], clients=clients)
        found[place] = one = summary(answers)
        rows.append((place, f"{one['tokens_per_second']:,.0f}", *(f"{one[name]:.1f}" for name in LATENCIES)))
    columns = ("the core runs in", "tokens a second", *LATENCIES.values())
    table(f"{count} requests of {OUTPUT_TOKENS} tokens from {clients} clients", columns, rows)
    return found


LATENCIES = {
    "ttft_p50_ms": "TTFT p50, ms",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "itl_max_ms": "longest gap",
}


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """What clients saw: tokens a second from the first sending to the last token, latencies in milliseconds."""
    gaps, ttfts = [gap for one in answers for gap in one.itls], [one.ttft for one in answers]
    seconds = max(one.events[-1] for one in answers) - min(one.due for one in answers)
    return {
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": len(answers) * OUTPUT_TOKENS / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(ttfts),
        "ttft_p99_ms": 1e3 * percentile(ttfts, 0.99),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps),
        "latency_mean_ms": 1e3 * statistics.mean(one.latency for one in answers),
    }


# ---- 3. break the naive server ---------------------------------------------------------------------------------------


class RawClient:
    """A connection that reads when it is told to, and of which the system keeps few bytes unread."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        self.socket.sendall(f"POST / HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    def read_events(self, number: int | None = None) -> int:
        """Reads to the end, or until there were so many events. Returns how many there were."""
        seen, text = 0, b""
        while (number is None or seen < number) and (text := self.socket.recv(1 << 16)):
            seen += text.count(b"data: ")
        return seen

    def close(self) -> None:
        """Leaves."""
        self.socket.close()


def measure_slow_client(servers: Mapping[str, tuple[int, Any]], quick: bool) -> dict:
    """Four clients are served; one more asks for 400 tokens, and reads only when nothing has moved for a while."""
    found, rows, seconds = {}, [], SECONDS_UNREAD[quick]
    slow, *others = prompts(5, seed=2)
    for name, (port, server) in servers.items():
        core = core_of(server)
        process = start_load(port, [Ask(to_lesson(token_ids, 200)) for token_ids in others], clients=4)
        while process.poll() is None and len(core.scheduler.requests) < 4:
            time.sleep(0.001)
        client = RawClient(port, to_lesson(slow, 400))
        _wait_until_still(core, seconds)
        events, answers = client.read_events(), answers_of(process)
        client.close()
        gap = max(gap for one in answers for gap in one.itls)
        found[name] = {"longest_gap_ms": 1e3 * gap, "events": events}
        rows.append((name, ms(gap), events))
    columns = ("server", "the others' longest gap, ms", "events with its 400 tokens")
    table(f"A client that reads nothing until all has stood still for {seconds:g} s, among four others", columns, rows)
    return {"unread_seconds": seconds, "servers": found}


def _wait_until_still(core: EngineCore, seconds: float) -> None:
    """Wait until the core has computed nothing for so long."""
    before, since = -1, time.monotonic()
    while time.monotonic() < since + seconds:
        computed = sum(request.num_computed_tokens for request in list(core.scheduler.requests.values()))
        if computed != before:
            before, since = computed, time.monotonic()
        time.sleep(0.01)


def measure_leaving(servers: Mapping[str, tuple[int, Any]]) -> dict:
    """Clients leave after their third event: the blocks that they hold at that moment and later, and tokens in vain."""
    found, rows = {}, []
    for name, (port, server) in servers.items():
        core, before = core_of(server), server.unread
        everybody = prompts(NUM_LEAVING, seed=3)
        clients = [RawClient(port, to_lesson(token_ids, TOKENS_OF_LEAVING)) for token_ids in everybody]
        for client in clients:
            client.read_events(3)
        for client in clients:
            client.close()
        most = blocks = held(core)
        while blocks:
            time.sleep(0.005)
            blocks = held(core)
            most = max(most, blocks)
        found[name] = {"in_vain": server.unread - before, "most_blocks": most}
        rows.append((name, f"{server.unread - before:,}", most))
    columns = ("server", "tokens for nobody", "most blocks that nobody uses")
    console.print()
    title = f"{NUM_LEAVING} clients ask for {TOKENS_OF_LEAVING} tokens each, and leave after three"
    table(title, columns, rows)
    return found


def core_of(server: Any) -> EngineCore:
    """The core of a server of the lesson, where it is in this process."""
    return getattr(server.core, "core", server.core)


def held(core: EngineCore) -> int:
    """Blocks that some request holds."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return core.scheduler.cache_config.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def show_stops(stop_strings: Callable[[list[str]], Any], pieces: Sequence[str] = ("an EN", "t E", "ND of")) -> dict:
    """What a client gets of a text in pieces, with the stop string END."""
    stops, rows = stop_strings(["END"]), []
    for piece in pieces:
        text, stopped = stops.push(piece)
        rows.append((repr(piece), repr(text), repr(stops.held), stopped or ""))
    console.print()
    table("The stop string END in pieces", ("comes", "is sent", "is held back", "stopped by"), rows)
    return {"sent": [row[1] for row in rows], "stopped": rows[-1][3]}


# ---- 4. what a server can bear ---------------------------------------------------------------------------------------


def measure_load(real: RealServer, arguments: argparse.Namespace) -> dict:
    """The real server under closed and open load: Little's law, the knee, and what is beyond it.

    Each rate is offered for three times as long as an answer takes at the most clients: in less, no queue has formed.
    """
    closed = _closed(real, arguments)
    capacity = max(one["requests_per_second"] for one in closed.values())
    latency = max(one["latency_mean_ms"] for one in closed.values()) / 1e3
    seconds, rounds = (0.5, 1) if arguments.quick else (max(2.0, 3 * latency), 2)
    least, most = 0.75 * capacity, 1.25 * capacity
    tried: dict[float, dict] = {}

    def attainment(rate: float) -> float:
        tried[rate] = _open(load_real(real, rate, seconds, arguments.seed), arguments)
        return tried[rate]["met"]

    knee = find_knee(attainment, least, most, rounds)
    if most not in tried:
        attainment(most)
    where = _where(knee, least, most)
    caption = (
        f"Each rate was offered for {seconds:.1f} s. The knee is {where} requests a second;\n"
        f"the closed load's most was {capacity:.1f}."
    )
    rows = [
        (f"{rate:.1f}", one["requests"], f"{one['met']:.0%}", *(ms(wait / 1e3) for wait in one["ttft_ms"]))
        for rate, one in sorted(tried.items())
    ]
    columns = ("requests/s", "requests", "met", "TTFT p50, 1st quarter, ms", "2nd", "3rd", "4th")
    console.print()
    table("Open load: who met the service level, and how long each quarter waited", columns, rows, caption)
    by_rate = {f"{rate:.1f}": one for rate, one in sorted(tried.items())}
    ends = {"least": least, "most": most, "above": tried[most]}
    return {"closed": closed, "capacity": capacity, "seconds": seconds, "knee": knee, "tried": by_rate} | ends


def _where(knee: float, least: float, most: float) -> str:
    """A knee in words, also if it is none of the rates that were offered."""
    if not knee:
        return f"below {least:.1f}"
    return f"above {most:.1f}" if knee == most else f"at {knee:.1f}"


def _open(answers: list[Answer], arguments: argparse.Namespace) -> dict:
    """The share that met the service level; the median time to a first token, by quarter of the requests in order."""
    met = [one.ttft <= arguments.slo_ttft and one.tpot(OUTPUT_TOKENS) <= arguments.slo_tpot for one in answers]
    came = sorted(answers, key=lambda one: one.due)
    size = max(1, len(came) // 4)
    quarters = [1e3 * statistics.median(one.ttft for one in came[at : at + size]) for at in range(0, 4 * size, size)]
    ends = {"ttft_first_ms": quarters[0], "ttft_last_ms": quarters[-1]}
    return {"requests": len(came), "met": statistics.mean(met), "ttft_ms": quarters} | ends


def _closed(real: RealServer, arguments: argparse.Namespace) -> dict:
    """So many clients, each of which asks again when it is answered; and who was in the server meanwhile."""
    found, rows = {}, []
    for clients in track((1, 4) if arguments.quick else (1, 16, 64, 96), "closed load"):
        asks = [Ask(to_real(token_ids)) for token_ids in prompts(3 * clients, arguments.seed + clients)]
        process = start_load(real.port, asks, clients=clients, path=COMPLETIONS)
        there, begin = [], None
        while process.poll() is None and (begin is None or there[-1] or len(there) < 2):
            there.append(real.num_open())
            begin = begin or (time.monotonic() if there[-1] else None)
            time.sleep(0.002)
        one = summary(answers_of(process))
        one["in_server"] = statistics.mean(count for count in there if count) if any(there) else 0.0
        one["little"] = one["requests_per_second"] * one["latency_mean_ms"] / 1e3
        found[str(clients)] = one
        rates = (f"{one['requests_per_second']:.1f}", f"{one['tokens_per_second']:,.0f}")
        times = (f"{one['ttft_p50_ms']:,.1f}", f"{one['latency_mean_ms']:,.0f}")
        rows.append((clients, *rates, *times, f"{one['little']:.1f}", f"{one['in_server']:.1f}"))
    columns = ("clients", "requests/s", "tokens/s", "TTFT p50, ms", "latency, ms", "rate × latency", "counted inside")
    table("Closed load on the real server", columns, rows)
    return found


# ---- 5. the grammar's mask -------------------------------------------------------------------------------------------


def as_bitmask(allowed: Tensor) -> Tensor:
    """Booleans [rows, vocab] as int32 [rows, ceil(vocab / 32)]: token t is bit t % 32 of word t // 32."""
    padded = torch.nn.functional.pad(allowed.long(), (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def apply_mask(kernel: Any, logits: Tensor, bitmask: Tensor, has_grammar: Tensor) -> None:
    """Launch the lesson's kernel on logits float32 [rows, vocab], in place; the others are int32."""
    rows, words = bitmask.shape
    kernel[(rows, -(-words // 32))](logits, bitmask, has_grammar, logits.shape[1], words, BLOCK=32)


def verify_mask(kernel: Any, device: torch.device) -> dict:
    """The kernel against a mask of booleans, bit for bit, in vocabularies that no word and no tile divides.

    Raises:
        AssertionError: it differs.
    """
    found, rows = {}, []
    for vocabulary in (31, 32, 1000, 4096, 5003):
        allowed, logits = torch.rand(3, vocabulary) < 0.3, torch.randn(3, vocabulary)
        has_grammar, masked = torch.tensor([1, 0, 1], dtype=torch.int32), logits.to(device)
        apply_mask(kernel, masked, as_bitmask(allowed).to(device), has_grammar.to(device))
        forbidden = ~allowed & has_grammar.bool()[:, None]
        right = logits.masked_fill(forbidden, -torch.inf)
        assert torch.equal(masked.cpu(), right), f"a vocabulary of {vocabulary} is masked wrongly"
        words = -(-vocabulary // 32)
        sizes = {"read": 3 * 4 + 2 * 4 * words, "written": 4 * int(forbidden.sum()), "logits": 2 * 4 * 3 * vocabulary}
        found[str(vocabulary)] = sizes
        rows.append((f"{vocabulary:,}", *(f"{size:,}" for size in sizes.values())))
    columns = ("vocabulary", "bytes read", "written", "a mask of floats, added")
    table("Three rows, of which two have a grammar: right bit for bit", columns, rows)
    return found


# ---- 6. TP, PP and DP ------------------------------------------------------------------------------------------------


def measure_ways(arguments: argparse.Namespace) -> dict:
    """Four GPUs and one model, in the three ways: what is sent, what fits, how fast, and the knee under two levels."""
    model, gpu = known_model(MODEL), get_hardware(GPU)
    counted, rounds = (4, 1) if arguments.quick else (60, 4)
    seed = arguments.seed
    found, rows = {}, []
    for way in track(("TP", "PP", "DP"), "simulating"):
        deployment = Deployment(model, gpu, way, GPUS)
        served = cache(lambda rate, deployment=deployment: serve(deployment, rate, counted, seed=seed))
        knees = {
            name: find_knee(lambda rate, s=served, t=tpot: s(rate).attainment(TTFT_SLO, t), *KNEES, rounds)
            for name, tpot in TPOT_SLOS.items()
        }
        alone = serve(deployment, 0.01, 12, seed=seed)
        found[way] = one = {
            "sent_64": bytes_sent(way, GPUS, 64, model.hidden_size, model.num_hidden_layers),
            "kv_tokens": deployment.kv_tokens(),
            "alone_ms": 1e3 * statistics.median(alone.run.tpots),
            "knees": knees,
        }
        sent = f"{one['sent_64'] / 1e6:.1f}"
        rows.append((way, sent, f"{one['kv_tokens']:,}", f"{one['alone_ms']:.1f}", *map(shown_knee, knees.values())))
    columns = (
        "way",
        "MB sent, 64 tokens",
        "tokens cached",
        "TPOT alone, ms",
        *(f"knee, TPOT ≤ {1e3 * slo:g} ms" for slo in TPOT_SLOS.values()),
    )
    scaling = [check.error for check in published_checks() if "GPUs against one" in check.what]
    errors = ", ".join(f"{error:+.0%}" for error in scaling)
    caption = (
        f"knees in requests a second, too low by {(KNEES[1] - KNEES[0]) / 2**rounds:g} at most (ShareGPT's lengths, "
        f"TTFT ≤ {TTFT_SLO:g} s). Against published scaling on 2, 4 "
        f"and 8 A100 the model's TP is off by {errors}; for PP we know no figure to hold it against."
    )
    table(f"{MODEL} on {GPUS} {GPU}, modelled", columns, rows, caption)
    bubbles = {str(batches): bubble(GPUS, batches) for batches in (1, 2, 4, 16)}
    console.print(
        "A pipeline of 4 idles " + ", ".join(f"{share:.0%} with {b}" for b, share in bubbles.items()) + " batches."
    )
    return {"ways": found, "bubble": bubbles, "scaling_off": scaling}


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def shown_knee(rate: float) -> str:
    """A modelled knee; where even the highest rate was borne, that is said."""
    return f"{'≥ ' if rate == KNEES[1] else ''}{rate:.0f}"


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    slow, left, load_, ways = found["slow"], found["left"], found["load"], found["ways"]["ways"]
    above = load_["above"]
    knee = _where(load_["knee"], load_["least"], load_["most"])
    tight, loose = ({way: shown_knee(one["knees"][level]) for way, one in ways.items()} for level in TPOT_SLOS)
    closing(
        f"A client that did not read for {slow['unread_seconds']:g} s stopped the naive server's others for "
        f"{slow['servers']['naive']['longest_gap_ms'] / 1e3:.1f} s, and clients that left had it compute "
        f"{left['naive']['in_vain']:,} tokens for nobody.",
        Timed(
            f"This server's knee is {knee} requests a second. At {load_['most']:.1f}, the first "
            f"quarter of the requests waited {above['ttft_first_ms']:,.0f} ms for a first token, the last "
            f"{above['ttft_last_ms']:,.0f}."
        ),
        f"On 4 {GPU}, modelled: for {MODEL} within {1e3 * TPOT_SLOS['tight']:g} ms a token TP bears "
        f"{tight['TP']} requests a second and DP {tight['DP']}; within {1e3 * TPOT_SLOS['loose']:g} ms "
        f"{loose['TP']} and {loose['DP']}.",
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """Throughput and latency over the clients; first tokens below and above the knee; modelled knees."""
    with panels(path, 3) as (left, middle, right):
        closed = found["load"]["closed"]
        left.plot(
            [one["tokens_per_second"] for one in closed.values()],
            [one["latency_mean_ms"] for one in closed.values()],
            "o-",
            color=palette.BLUE,
        )
        for clients, one in closed.items():
            place = one["tokens_per_second"], one["latency_mean_ms"]
            left.annotate(clients, place, xytext=(-3, 5), textcoords="offset points", ha="right", fontsize=9)
        left.set(title="Closed load: clients", xlabel="tokens a second", ylabel="ms a request", ylim=(0, None))
        tried = found["load"]["tried"].items()
        curves(middle, {f"{rate} a second": dict(enumerate(one["ttft_ms"], start=1)) for rate, one in tried})
        middle.set(title="Open load: first token", xlabel="quarter of the requests", ylabel="ms", xticks=(1, 2, 3, 4))
        ways = found["ways"]["ways"]
        knees = [
            (f"{way}, {1e3 * TPOT_SLOS[slo]:g} ms a token: {knee:.0f}", knee, palette.SKY)
            for way, one in ways.items()
            for slo, knee in one["knees"].items()
        ]
        named_bars(right, knees)
        right.set(title=f"Knees on 4 {GPU} (modelled)", xlabel="requests a second")


def seconds_above_zero(text: str) -> float:
    """An argparse type: seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < 1000:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1000 seconds, got {text}")
    return value


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument(
        "--clients", type=whole_number(1, 64), default=16, help="of the closed load, 1 to 64 (default: 16)"
    )
    flags.add_argument(
        "--slo-ttft", type=seconds_above_zero, default=0.25, help="seconds to a first token (default: 0.25)"
    )
    flags.add_argument(
        "--slo-tpot", type=seconds_above_zero, default=0.05, help="seconds a token after it (default: 0.05)"
    )
    return flags
