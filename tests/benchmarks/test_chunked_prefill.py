"""Test the benchmark of token budgets: how it counts gaps and tokens, and how it joins two runs."""

import json

import pytest

from minivllm_lab.engines.http_load import Answer


def test_the_figures_of_a_load(bench):
    """The chat has a token every 10 ms and one gap of 500 ms, beside eight prompts from 1 s to 3 s."""
    begin = [0.01 * number for number in range(101)]
    chat = Answer(0.0, 0.0, events=[*begin, *(1.5 + 0.01 * number for number in range(201))])
    longs = [
        Answer(1.0, 1.0, events=[2.0 + 0.1 * index, *(2.8 + 0.2 * (n + 1) / 7 for n in range(7))])
        for index in range(bench.LONG)
    ]
    figures = bench.figures_of([chat], longs)
    assert figures["itl_p50_ms"] == pytest.approx(10)
    assert figures["itl_max_ms"] == pytest.approx(500)
    assert figures["ttft_p50_ms"] == pytest.approx(1350)
    assert figures["ttft_max_ms"] == pytest.approx(1700)
    during = sum(1.0 < at <= 3.0 for at in chat.events)
    tokens = bench.LONG * (bench.LONG_PROMPT + 8) + during
    assert figures["tokens_per_second"] == pytest.approx(tokens / 2.0)


def test_bursts_are_counted_apart(bench):
    """The rate leaves out the chats' tokens between two bursts."""
    chat = Answer(0.0, 0.0, events=[0.1 * number for number in range(100)])
    longs = [Answer(at, at, events=[at + 1.0]) for at in (1.0, 5.0) for _ in range(bench.LONG)]
    figures = bench.figures_of([chat], longs)
    during = sum(1.0 < at <= 2.0 or 5.0 < at <= 6.0 for at in chat.events)
    assert figures["tokens_per_second"] == pytest.approx((2 * bench.LONG * 1901 + during) / 2.0)


def test_the_peers_figures_join_ours(bench, tmp_path):
    path = tmp_path / "results.json"
    ours = {
        "figures": {"work": {"bursts": 2}, "disturbance": {"waited": 0.0}, "servers": {"minivllm": {"64": {"x": 1}}}}
    }
    path.write_text(json.dumps(ours))
    theirs = {"figures": {"work": {"bursts": 2}, "disturbance_vllm": {}, "servers": {"vllm": {"64": {"x": 2}}}}}
    joined = bench.joined(str(path), theirs)["figures"]
    assert joined["servers"] == {"minivllm": {"64": {"x": 1}}, "vllm": {"64": {"x": 2}}}
    assert joined["disturbance"] == {"waited": 0.0}
    assert bench.joined(str(tmp_path / "none.json"), theirs) == theirs
