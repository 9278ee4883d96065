"""`minivllm bench serve`: when requests are sent, what is measured of them, and that the table says so."""

import asyncio
import json
import math
import statistics
from collections import Counter

import pytest
from server.serving import MODEL, Server

from minivllm.benchmarks.client import RequestFuncOutput, Target, events, text_of
from minivllm.benchmarks.datasets import custom_requests, random_requests, sharegpt_requests
from minivllm.benchmarks.load import LoadResult, arrival_times
from minivllm.benchmarks.metrics import calculate_metrics, table_of
from minivllm.core.stats import SpecDecodingStats
from minivllm.entrypoints.cli.main import main
from minivllm.errors import MinivllmError
from minivllm.models.tokenizer import load_tokenizer


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, spread: float):
    times = arrival_times(20_000, 50.0, burstiness, seed=3)
    assert times[-1] == pytest.approx(20_000 / 50.0)
    assert statistics.stdev(gaps(times)) * 50.0 == pytest.approx(spread, abs=0.05)
    assert times == arrival_times(20_000, 50.0, burstiness, seed=3)


def test_a_poisson_process_has_poisson_counts():
    """The variance of the number of arrivals in a window is its mean."""
    counts = Counter(int(when) for when in arrival_times(20_000, 20.0, seed=1))
    numbers = [counts[second] for second in range(999)]
    assert statistics.variance(numbers) == pytest.approx(statistics.mean(numbers), rel=0.15)


def test_without_a_rate_all_come_at_once():
    assert arrival_times(3, math.inf) == [0.0] * 3


QUICK = RequestFuncOutput(True, "", 10.0, 0.0, 0.1, [0.1, 0.3], 0.5, 7, 3, "abc")
SLOW = RequestFuncOutput(True, "", 10.5, 0.2, 0.6, [0.2], 0.8, 5, 5, "de")
LOST = RequestFuncOutput(False, "500: no", 11.0)


def test_the_figures_by_hand():
    figures = calculate_metrics(
        LoadResult([QUICK, SLOW, LOST], 2.0),
        percentile_metrics=("ttft", "tpot", "itl", "e2el"),
        metric_percentiles=(50, 99.9),
        goodput={"ttft": 150, "tpot": 250},
    )
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (12, 8)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.0, 4.0)
    assert (figures["total_token_throughput"], figures["request_goodput"]) == (10.0, 0.5)
    assert figures["mean_ttft_ms"] == pytest.approx(350)
    assert figures["mean_tpot_ms"] == pytest.approx((200 + 50) / 2)
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["p50_e2el_ms"] == pytest.approx(650)
    assert figures["p99.9_e2el_ms"] == pytest.approx(800, rel=1e-3)
    assert figures["output_lens"] == [3, 5, 0]
    assert figures["max_concurrent_requests"] == 2
    assert figures["max_output_tokens_per_s"] == 3.0  # events in the first second; two more come in the second one


def test_the_table_has_vllms_rows():
    figures = calculate_metrics(LoadResult([QUICK, SLOW], 2.0), goodput={"ttft": 150})
    lines = table_of(figures, max_concurrency=4, request_rate=2.5).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     2         "
    assert "Request goodput (req/s):                 0.50      " in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "P99 TTFT (ms):                           595.00    " in lines
    assert not any("E2EL" in line for line in lines)
    assert {len(line) for line in lines} <= {50, 51}


def test_the_table_tells_what_became_of_drafts():
    drafts = SpecDecodingStats(40, 100, 45, [30, 10, 5]).since(SpecDecodingStats(20, 40, 15, [10, 5]))
    figures = calculate_metrics(LoadResult([QUICK], 2.0), drafts=drafts)
    assert figures["spec_decode_acceptance_length"] == 1 + 30 / 20
    assert figures["spec_decode_per_position_acceptance_rates"] == [1.0, 0.25, 0.25]
    lines = table_of(figures).splitlines()
    assert lines[-11:-1] == [
        "---------------Speculative Decoding---------------",
        "Acceptance rate (%):                     50.00     ",
        "Acceptance length:                       2.50      ",
        "Drafts:                                  20        ",
        "Draft tokens:                            60        ",
        "Accepted tokens:                         30        ",
        "Per-position acceptance (%):",
        "  Position 0:                            100.00    ",
        "  Position 1:                            25.00     ",
        "  Position 2:                            25.00     ",
    ]
    assert "Speculative" not in table_of(calculate_metrics(LoadResult([QUICK], 2.0)))


class Pieces:
    """A body that comes in these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def iter_any(self):
        for piece in self._pieces:
            yield piece


def test_events_are_found_however_they_are_cut():
    body = b'data: {"a": 1}\n\n: ping\n\ndata: {"b": "\xe2\x80\xa8"}\n\ndata: [DONE]\n\n'

    async def found(*pieces: bytes) -> list[bytes]:
        return [event async for event in events(Pieces(*pieces))]  # type: ignore[arg-type]

    whole = asyncio.run(found(body))
    assert [json.loads(event) for event in whole] == [{"a": 1}, {"b": "\u2028"}]
    for cut in range(1, len(body)):
        assert asyncio.run(found(body[:cut], body[cut:])) == whole


@pytest.mark.parametrize(
    ("event", "chat", "text"),
    [
        ({"choices": [{"text": "a"}]}, False, "a"),
        ({"choices": [{"text": ""}]}, False, ""),  # a token without a text, and it counts
        ({"choices": [], "usage": {}}, False, None),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, True, None),  # no token yet
        ({"choices": [{"delta": {"content": ""}}]}, True, ""),
        ({"choices": [{"delta": {"content": "b"}}]}, True, "b"),
        ({"choices": [{"delta": {}}]}, True, None),
    ],
)
def test_which_events_have_output(event, chat, text):
    assert text_of(event, chat) == text


def test_random_prompts_have_the_lengths_that_were_asked_for():
    tokenizer = load_tokenizer(MODEL)
    found = random_requests(
        tokenizer, 60, input_len=40, output_len=10, range_ratio={"input": 0.5, "output": 0.2}, prefix_len=12, seed=2
    )
    lengths = [one.prompt_len for one in found]
    assert 30 <= min(lengths) < 40
    assert 64 < max(lengths) <= 74
    assert {one.expected_output_len for one in found} == {8, 9, 10, 11, 12}
    assert lengths == [len(tokenizer.encode(one.prompt).ids) for one in found]
    heads = {tuple(tokenizer.encode(one.prompt).ids[:8]) for one in found}
    assert len(heads) == 1
    assert len({one.prompt for one in found}) == 60
    exact = random_requests(tokenizer, 30, input_len=64, output_len=4, seed=5)
    assert [one.prompt_len for one in exact] == [64] * 30


def test_conversations_and_own_prompts(tmp_path):
    tokenizer = load_tokenizer(MODEL)
    long, short = "def add(a, b):\n    return a + b\n", "a"
    turns = [[{"value": long}, {"value": long}], [{"value": short}, {"value": long}], [{"value": long}]]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": one} for one in turns]))
    found = sharegpt_requests(tokenizer, path, 3)
    assert [one.prompt for one in found] == [long] * 3  # the only one that can be used, again and again
    assert {(one.prompt_len, one.expected_output_len) for one in found} == {(len(tokenizer.encode(long).ids),) * 2}
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": long, "output_tokens": 9}) + "\n")
    assert custom_requests(tokenizer, own, 1, output_len=-1)[0].expected_output_len == 9
    own.write_text("{")
    with pytest.raises(MinivllmError, match="JSON lines"):
        custom_requests(tokenizer, own, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--goodput", "ttft"], "NAME:MS"),
        (["--goodput", "itl:3", "--model", str(MODEL)], "itl"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--request-rate", "0"], "above 0"),
        (["--metric-percentiles", "101"], "101"),
        (["--backend", "smoke"], "smoke"),
        (["--random-range-ratio", "x"], "JSON"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--port", "1"], "no model is served at"),
        (["--base-url", "localhost:8000"], "http://"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_one_line(flags, said, capfd):
    assert main(["bench", "serve", "--num-prompts", "1", *flags]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("minivllm: ")
    assert said in line


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_client_and_server_count_alike(base: Server, chat: Server, backend: str, tmp_path, capsys):
    """The same requests, tokens and times, as far as they can be compared."""
    server = chat if backend == "openai-chat" else base
    flags = ["--backend", backend, "--base-url", server.url, "--tokenizer", str(MODEL), "--num-prompts", "12"]
    flags += ["--random-input-len", "20", "--random-output-len", "6", "--request-rate", "100", "--temperature", "0"]
    flags += ["--max-concurrency", "4", "--seed", "1", "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
    flags += ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "found.json"]
    if backend == "openai-chat":
        flags += ["--header", f"Authorization={server.client.headers['Authorization']}"]
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    before = [server.metric(f"vllm:{name}") for name in names]
    before_ttft = server.metric("vllm:time_to_first_token_seconds_sum")
    assert main(["bench", "serve", *flags]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (12, 0, 72)
    counted = [server.metric(f"vllm:{name}") - old for name, old in zip(names, before, strict=True)]
    assert counted == [found["total_input_tokens"], 72, 12]
    assert found["output_lens"] == [6] * 12
    assert 0 < server.metric("vllm:time_to_first_token_seconds_sum") - before_ttft <= sum(found["ttfts"])
    assert all(one <= total for one, total in zip(found["ttfts"], found["latencies"], strict=True))
    assert "Serving Benchmark Result" in capsys.readouterr().out


def test_a_target_names_its_route():
    assert Target("http://a:1/", "m").url == "http://a:1/v1/completions"
    assert Target("http://a:1", "m", "openai-chat").url == "http://a:1/v1/chat/completions"
    assert Target("http://a:1", "m", endpoint="/x").url == "http://a:1/x"
