"""Test the benchmark of servers: its requests, and the statistics of their answers."""

import pytest

from minivllm_lab.engines.http_load import Answer, Ask


def test_requests_have_the_lengths_that_were_asked_for(bench):
    asks = bench.random_asks(200, 96, 64, 0.5, seed=3)
    outputs = [ask.body["max_tokens"] for ask in asks]
    inputs = [len(prompt) for prompt in bench.prompt_tokens(asks)]
    assert (min(outputs), max(outputs)) == (32, 96)
    assert 48 <= min(inputs) < 60
    assert 130 < max(inputs) <= 146
    assert len({ask.body["prompt"] for ask in asks}) == 200
    assert asks == bench.random_asks(200, 96, 64, 0.5, seed=3)


def test_an_open_load_has_its_rate(bench):
    asks = bench.at_rate([Ask({"n": index}) for index in range(2000)], 50.0)
    assert [ask.body["n"] for ask in asks] == list(range(2000))
    assert asks[-1].at == pytest.approx(2000 / 50.0, rel=0.1)


def test_the_figures_by_hand(bench):
    asks = [Ask({"prompt": "import os", "max_tokens": tokens}) for tokens in (3, 2)]
    quick = Answer(due=10.0, sent=10.0, events=[10.1, 10.2, 10.5])
    slow = Answer(due=10.5, sent=10.6, events=[11.1, 12.0])
    figures = bench.figures_of([slow, quick], asks)
    assert figures["duration"] == pytest.approx(2.0)
    assert figures["total_input_tokens"] == 2 * len(bench.prompt_tokens(asks)[0])
    assert (figures["total_output_tokens"], figures["output_throughput"]) == (5, pytest.approx(2.5))
    assert figures["request_throughput"] == pytest.approx(1.0)
    assert figures["median_ttft_ms"] == pytest.approx(350)
    assert figures["median_itl_ms"] == pytest.approx(300)
    assert figures["median_e2el_ms"] == pytest.approx(1000)
    assert figures["p99_ttft_ms"] == pytest.approx(600)
