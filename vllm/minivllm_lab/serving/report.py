"""Lesson 06's measurements on servers, its tables, its figure and its command line.

Each `measure_*` function measures, prints its table and returns its figures; the callables and
classes that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.core import EngineCore
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import SMALL_TEXT, curves, panels
from minivllm_lab.http_load import Answer, Ask, answers_of, load, start_load
from minivllm_lab.progress import track
from minivllm_lab.serving.request_trace import HOPS, trace
from minivllm_lab.tables import Timed, closing, console, heading, ms, record_table
from minivllm_simulate.deployments import bytes_sent, deployment, find_knee, serve
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.virtual_clock import percentile

PROMPT_TOKENS = 32
SLO_TTFT = 0.25
"""Seconds to a first token, by default."""
NUM_LEAVING, TOKENS_OF_LEAVING = 6, 200
GPUS, GPU, MODEL = 4, "H100", "Llama-3.1-8B"
TTFT_SLO, TPOT_SLOS = 0.5, {"tight": 0.0075, "loose": 0.010}
"""Seconds, of the modelled deployments."""


@dataclass(frozen=True)
class Sizes:
    """The amount of work that the lesson measures; modelled knees are sought between the two rates
    in `knees`.
    """

    output_tokens: int = 64
    traced: int = 7
    seconds_unread: float = 1.5
    rounds_of_clients: int = 6
    closed: Sequence[int] = (1, 16, 64, 96)
    simulated: int = 60
    knees: tuple[int, int] = (1, 241)
    bisections: int = 4


FULL = Sizes()
QUICK = Sizes(16, 1, 0.6, 1, (1, 4), 4, (1, 25), 1)


def sizes(arguments: argparse.Namespace) -> Sizes:
    """Return the amount of work to measure."""
    return QUICK if arguments.quick else FULL


# ---- requests ------------------------------------------------------------------------------------


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return the token ids of prompts that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(300, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def to_lesson(token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Make the body of a request to one of the lesson's servers."""
    return {"prompt": {"prompt_token_ids": list(token_ids)}, "max_tokens": max_tokens}


def to_real(token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Make the body of a request to the real server."""
    return {"prompt": list(token_ids), "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}


load_completions = partial(load, path="/v1/completions")


def load_real(port: int, rate: float, seconds: float, output_tokens: int, seed: int) -> list[Answer]:
    """Offer requests to the real server at this rate, at random times, for this many seconds; wait
    until all are answered.
    """
    draw, at, asks = random.Random(seed), 0.0, []
    for token_ids in prompts(max(8, round(rate * seconds)), seed):
        at += draw.expovariate(rate)
        asks.append(Ask(to_real(token_ids, output_tokens), at))
    return load_completions(port, asks)


# ---- 1. one request ------------------------------------------------------------------------------


def measure_trace(port: int, arguments: argparse.Namespace) -> dict:
    """Trace requests that are alone in the server; show, hop by hop, the one with the median time
    to first token.
    """
    heading("1. One request, hop by hop")
    count, runs = sizes(arguments).traced, []
    asks = [Ask(to_real(token_ids, 16)) for token_ids in prompts(count + 3, seed=1)]
    load_completions(port, asks[:3], clients=1)  # to warm up
    for ask in asks[3:]:
        with trace() as times:
            (answer,) = load_completions(port, [ask], clients=1)
        runs.append((answer, times))
    answer, times = sorted(runs, key=lambda run: run[0].ttft)[count // 2]
    marks = {"the client is connected": answer.connected} | {hop: times[hop] for hop in HOPS if hop in times}
    marks["the client has the first event"] = answer.events[0]
    at = {hop: seconds - answer.sent for hop, seconds in marks.items()}
    since = [0.0, *at.values()]
    rows = {hop: {"at": t, "since": t - before} for (hop, t), before in zip(at.items(), since, strict=False)}
    title = "From a POST to its first token"
    caption = f"and {len(answer.events) - 1} events later, at {ms(answer.latency)} ms, the last"
    record_table(title, rows, "hop {name} | at, ms {at:ms} | since the one before {since:ms}", caption)
    server_ttft = at["the text is in its collector"] - at["its JSON is checked"]
    at_ms = {hop: 1e3 * seconds for hop, seconds in at.items()}
    return {"at_ms": at_ms, "ttft_ms": 1e3 * answer.ttft, "server_ttft_ms": 1e3 * server_ttft}


# ---- 2. where the core runs ----------------------------------------------------------------------


def measure_places(ports: Mapping[str, int], arguments: argparse.Namespace) -> dict:
    """Measure the lesson's server under the same closed load, by where its core runs."""
    heading("2. Where the core runs")
    size = sizes(arguments)
    clients = min(4, arguments.clients) if arguments.quick else arguments.clients
    count, results = size.rounds_of_clients * clients, {}
    asks = [Ask(to_lesson(token_ids, size.output_tokens)) for token_ids in prompts(count + 1, arguments.seed)]
    for place, port in track(ports.items(), "loading"):
        load(port, asks[:1], clients=1)  # to warm up
        results[place] = summary(load(port, asks[1:], clients=clients), size.output_tokens)
    columns = "the core runs in {name} | tokens a second {tokens_per_second:,.0f} | TTFT p50, ms {ttft_p50_ms:.1f}"
    columns += " | ITL p50 {itl_p50_ms:.1f} | ITL p99 {itl_p99_ms:.1f} | longest gap {itl_max_ms:.1f}"
    record_table(f"{count} requests of {size.output_tokens} tokens from {clients} clients", results, columns)
    return results


def summary(answers: Sequence[Answer], output_tokens: int) -> dict[str, float]:
    """Summarize the clients' measurements, from the first request sent to the last token."""
    gaps = [gap for answer in answers for gap in answer.itls]
    ttfts = [answer.ttft for answer in answers]
    seconds = max(answer.events[-1] for answer in answers) - min(answer.due for answer in answers)
    return {
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": len(answers) * output_tokens / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(ttfts),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps),
        "latency_mean_ms": 1e3 * statistics.mean(answer.latency for answer in answers),
    }


# ---- 3. break the naive server -------------------------------------------------------------------


class RawClient:
    """A connection that reads only on request; the operating system buffers only a few bytes for
    it.
    """

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        self.socket.sendall(f"POST / HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    def read_events(self, number: int | None = None) -> int:
        """Read to the end, or until `number` events have arrived; return how many did."""
        seen, text = 0, b""
        while (number is None or seen < number) and (text := self.socket.recv(1 << 16)):
            seen += text.count(b"data: ")
        return seen


def measure_slow_client(servers: Mapping[str, tuple[int, Any]], arguments: argparse.Namespace) -> dict:
    """Serve four clients and one that asks for 400 tokens but reads only when nothing has moved for
    a while.
    """
    heading("3. Break the naive server")
    results, seconds = {}, sizes(arguments).seconds_unread
    slow, *others = prompts(5, seed=2)
    for name, (port, server) in servers.items():
        core = core_of(server)
        process = start_load(port, [Ask(to_lesson(token_ids, 200)) for token_ids in others], clients=4)
        while process.poll() is None and len(core.scheduler.requests) < 4:
            time.sleep(0.001)
        client = RawClient(port, to_lesson(slow, 400))
        _wait_until_still(core, seconds)
        events = client.read_events()
        gap = max(gap for answer in answers_of(process) for gap in answer.itls)
        client.socket.close()
        results[name] = {"longest_gap_ms": 1e3 * gap, "events": events, "gap": gap}
    title = f"A client that reads nothing until nothing has moved for {seconds:g} s, among four others"
    columns = "server {name} | the others' longest gap, ms {gap:ms} | events with its 400 tokens {events}"
    record_table(title, results, columns)
    return {"unread_seconds": seconds, "servers": results}


def _wait_until_still(core: EngineCore, seconds: float) -> None:
    """Wait until the core has computed nothing for this many seconds."""
    before, since = -1, time.monotonic()
    while time.monotonic() < since + seconds:
        computed = sum(request.num_computed_tokens for request in list(core.scheduler.requests.values()))
        if computed != before:
            before, since = computed, time.monotonic()
        time.sleep(0.01)


def measure_leaving(servers: Mapping[str, tuple[int, Any]]) -> dict:
    """Let clients leave after their third event; count the tokens computed in vain and the blocks
    held meanwhile.
    """
    results = {}
    for name, (port, server) in servers.items():
        core, before = core_of(server), server.unread
        bodies = [to_lesson(token_ids, TOKENS_OF_LEAVING) for token_ids in prompts(NUM_LEAVING, seed=3)]
        clients = [RawClient(port, body) for body in bodies]
        for client in clients:
            client.read_events(3)
        for client in clients:
            client.socket.close()
        most = blocks = held(core)
        while blocks:
            time.sleep(0.005)
            blocks = held(core)
            most = max(most, blocks)
        results[name] = {"in_vain": server.unread - before, "most_blocks": most}
    console.print()
    title = f"{NUM_LEAVING} clients ask for {TOKENS_OF_LEAVING} tokens each, and leave after three"
    columns = "server {name} | tokens in vain {in_vain:,} | most unused blocks {most_blocks}"
    record_table(title, results, columns)
    return results


def core_of(server: Any) -> EngineCore:
    """Return the core of one of the lesson's servers, which runs in this process."""
    return getattr(server.core, "core", server.core)


def held(core: EngineCore) -> int:
    """Count the blocks that requests hold."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return pool.num_usable_blocks - pool.get_num_free_blocks()


# ---- 4. what a server can handle -----------------------------------------------------------------


def measure_load(port: int, arguments: argparse.Namespace) -> dict:
    """Put closed and open load on the real server: Little's law, the knee, and what happens beyond
    it.

    Each rate is offered for three times as long as an answer takes with the largest number of
    clients: in less time, no queue builds up.
    """
    heading("4. What a server can handle")
    size, closed = sizes(arguments), _closed_load(port, arguments)
    capacity = max(record["requests_per_second"] for record in closed.values())
    latency = max(record["latency_mean_ms"] for record in closed.values()) / 1e3
    seconds, rounds = (0.5, 1) if arguments.quick else (max(2.0, 3 * latency), 2)
    least, most = 0.75 * capacity, 1.25 * capacity
    tried: dict[float, dict] = {}

    def attainment(rate: float) -> float:
        answers = load_real(port, rate, seconds, size.output_tokens, arguments.seed)
        tried[rate] = _open_load(answers, size.output_tokens, arguments)
        return tried[rate]["met"]

    knee = find_knee(attainment, least, most, rounds)
    if most not in tried:
        attainment(most)
    by_rate = {f"{rate:.1f}": record for rate, record in sorted(tried.items())}
    shown = {rate: record | dict(zip("abcd", record["ttft_ms"], strict=True)) for rate, record in by_rate.items()}
    columns = "requests/s {name} | requests {requests} | met {met:.0%}"
    columns += " | TTFT p50, 1st quarter, ms {a:,.0f} | 2nd {b:,.0f} | 3rd {c:,.0f} | 4th {d:,.0f}"
    title = "Open load: share that met the service level, and each quarter's wait"
    caption = f"Each rate was offered for {seconds:.1f} s. Knee {_describe(knee, least, most)} requests a second."
    console.print()
    record_table(title, shown, columns, caption)
    ends = {"least": least, "most": most, "above": tried[most]}
    asked = {"slo_ttft": arguments.slo_ttft}
    return {"closed": closed, "capacity": capacity, "seconds": seconds, "knee": knee, "tried": by_rate} | ends | asked


def _describe(knee: float, least: float, most: float) -> str:
    """Describe a knee in words; it may be beyond all rates that were offered."""
    if not knee:
        return f"below {least:.1f}"
    return f"above {most:.1f}" if knee == most else f"at {knee:.1f}"


def _open_load(answers: list[Answer], output_tokens: int, arguments: argparse.Namespace) -> dict:
    """Return the share of requests that met the service level, and each quarter's median time to
    first token, in order.
    """
    ttft, tpot = arguments.slo_ttft, arguments.slo_tpot
    met = [answer.ttft <= ttft and answer.tpot(output_tokens) <= tpot for answer in answers]
    ttfts = [answer.ttft for answer in sorted(answers, key=lambda answer: answer.due)]
    size = max(1, len(ttfts) // 4)
    quarters = [1e3 * statistics.median(ttfts[at : at + size]) for at in range(0, 4 * size, size)]
    record = {"requests": len(ttfts), "met": statistics.mean(met), "ttft_ms": quarters}
    return record | {"ttft_first_ms": quarters[0], "ttft_last_ms": quarters[-1]}


def _closed_load(port: int, arguments: argparse.Namespace) -> dict:
    """Let each client send its next request once it is answered; show the mean number inside, by
    Little's law.
    """
    size, results = sizes(arguments), {}
    for clients in track(size.closed, "closed load"):
        drawn = prompts(3 * clients, arguments.seed + clients)
        asks = [Ask(to_real(token_ids, size.output_tokens)) for token_ids in drawn]
        record = summary(load_completions(port, asks, clients=clients), size.output_tokens)
        record["little"] = record["requests_per_second"] * record["latency_mean_ms"] / 1e3
        results[str(clients)] = record
    columns = "clients {name} | requests/s {requests_per_second:.1f} | TTFT p50, ms {ttft_p50_ms:,.1f}"
    columns += " | latency, ms {latency_mean_ms:,.0f} | rate × latency {little:.1f}"
    record_table("Closed load on the real server", results, columns)
    return results


# ---- 5. the grammar's mask -----------------------------------------------------------------------


def as_bitmask(allowed: Tensor) -> Tensor:
    """Pack booleans [rows, vocab] into int32 [rows, ceil(vocab / 32)]: token t is bit t % 32 of
    word t // 32.
    """
    padded = torch.nn.functional.pad(allowed.long(), (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def apply_mask(kernel: Any, logits: Tensor, bitmask: Tensor, has_grammar: Tensor) -> None:
    """Launch the lesson's kernel on logits float32 [rows, vocab], in place; the other tensors are
    int32.
    """
    rows, words = bitmask.shape
    kernel[(rows, -(-words // 32))](logits, bitmask, has_grammar, logits.shape[1], words, BLOCK=32)


def verify_mask(kernel: Any, device: torch.device) -> dict:
    """Compare the kernel bit for bit with a boolean mask, for vocabularies that are no multiple of
    a word or a tile.

    Raises:
        AssertionError: the results differ.
    """
    heading("5. The grammar's mask")
    vocabularies = (31, 32, 1000, 4096, 5003)
    for vocabulary in vocabularies:
        allowed, logits = torch.rand(3, vocabulary) < 0.3, torch.randn(3, vocabulary)
        has_grammar, masked = torch.tensor([1, 0, 1], dtype=torch.int32), logits.to(device)
        apply_mask(kernel, masked, as_bitmask(allowed).to(device), has_grammar.to(device))
        expected = logits.masked_fill(~allowed & has_grammar.bool()[:, None], -torch.inf)
        assert torch.equal(masked.cpu(), expected), f"a vocabulary of {vocabulary} is masked wrongly"
    console.print(f"two of three rows have a grammar, vocabularies of {vocabularies}: correct bit for bit")
    return {"vocabularies": vocabularies}


# ---- 6. TP, PP and DP ----------------------------------------------------------------------------


def measure_ways(arguments: argparse.Namespace) -> dict:
    """Simulate one model on four GPUs under TP, PP and DP: what is sent, what fits, the speed, and
    the knees.
    """
    heading("6. TP, PP and DP")
    model, gpu, size = known_model(MODEL), get_hardware(GPU), sizes(arguments)
    results = {}
    for way in track(("TP", "PP", "DP"), "simulating"):
        placed = deployment(model, gpu, way, GPUS)
        served = cache(partial(serve, placed, counted=size.simulated, seed=arguments.seed))

        def knee(tpot: float, served: Callable = served) -> float:
            return find_knee(lambda rate: served(rate).attainment(TTFT_SLO, tpot), *size.knees, size.bisections)

        results[way] = {
            "sent_64": bytes_sent(way, GPUS, 64, model.hidden_size, model.num_hidden_layers),
            "kv_tokens": placed.kv_tokens() * placed.layout.groups,
            "alone_ms": 1e3 * statistics.median(serve(placed, 0.01, 12, seed=arguments.seed).tpots),
            "knees": {name: knee(tpot) for name, tpot in TPOT_SLOS.items()},
        }
    shown = {way: {**each, "sent": each["sent_64"] / 1e6, **shown_knees(each, size)} for way, each in results.items()}
    columns = "way {name} | MB sent, 64 tokens {sent:.1f} | tokens cached {kv_tokens:,} | TPOT alone, ms {alone_ms:.1f}"
    columns += "".join(f" | knee, TPOT ≤ {1e3 * slo:g} ms {{{name}}}" for name, slo in TPOT_SLOS.items())
    off = (size.knees[1] - size.knees[0]) / 2**size.bisections
    caption = f"knees in requests a second, too low by {off:g} at most (ShareGPT's lengths, TTFT ≤ {TTFT_SLO:g} s)."
    record_table(f"{MODEL} on {GPUS} {GPU}, modelled", shown, columns, caption)
    return {"ways": results}


def shown_knees(record: Mapping[str, Any], size: Sizes) -> dict[str, str]:
    """Format modelled knees, with "≥" where even the highest rate met the service level."""
    return {name: f"{'≥ ' if rate == size.knees[1] else ''}{rate:.0f}" for name, rate in record["knees"].items()}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, arguments: argparse.Namespace, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    slow, left, load_results = results["slow"], results["left"], results["load"]
    knee = _describe(load_results["knee"], load_results["least"], load_results["most"])
    knees = {way: shown_knees(record, sizes(arguments)) for way, record in results["ways"]["ways"].items()}
    closing(
        f"A client that did not read for {slow['unread_seconds']:g} s stopped the naive server's others for "
        f"{slow['servers']['naive']['longest_gap_ms'] / 1e3:.1f} s, and clients that left had it compute "
        f"{left['naive']['in_vain']:,} tokens in vain.",
        Timed(
            f"This server's knee is {knee} requests a second. At {load_results['most']:.1f}, the first quarter of the "
            f"requests waited {load_results['above']['ttft_first_ms']:,.0f} ms for a first token, the last "
            f"{load_results['above']['ttft_last_ms']:,.0f}."
        ),
        f"On 4 {GPU}, modelled: for {MODEL} within {1e3 * TPOT_SLOS['tight']:g} ms a token TP handles "
        f"{knees['TP']['tight']} requests a second and DP {knees['DP']['tight']}; within "
        f"{1e3 * TPOT_SLOS['loose']:g} ms {knees['TP']['loose']} and {knees['DP']['loose']}.",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot how long first tokens take under an open load, below and above the knee."""
    with panels(path, 1, width=6.4) as (axes,):
        load = results["load"]
        knee = f"{load['knee']:.1f}"
        words = {rate: f"{rate} a second" + ", the knee" * (rate == knee) for rate in load["tried"]}
        each = {words[rate]: dict(enumerate(run["ttft_ms"], start=1)) for rate, run in load["tried"].items()}
        curves(axes, each)
        limit = 1e3 * load.get("slo_ttft", SLO_TTFT)
        axes.axhline(limit, color=palette.GREY, linestyle="--")
        axes.annotate(f"the limit: {limit:g} ms", (1, limit), va="bottom", fontsize=SMALL_TEXT)
        axes.set(xlabel="quarter of the requests", ylabel="ms to the first token", xticks=(1, 2, 3, 4))
        axes.set(title="Arrivals below the knee, at it and above")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; --help shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    clients = "clients of the closed load, 1 to 64 (default: 16)"
    flags.add_argument("--clients", type=whole_number(1, 64), default=16, help=clients)
    first = f"seconds to a first token (default: {SLO_TTFT:g})"
    flags.add_argument("--slo-ttft", type=float, default=SLO_TTFT, help=first)
    flags.add_argument("--slo-tpot", type=float, default=0.05, help="seconds per token after it (default: 0.05)")
    return flags
