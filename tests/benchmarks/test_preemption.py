"""Test the benchmark of preemption: how it reads a server's metrics, and what it reports."""

import contextlib

import pytest


def test_a_metric_is_the_sum_over_all_cores(bench):
    text = (
        "# HELP vllm:num_preemptions_total Preemptions.\n"
        'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="m"} 4.0\n'
        'vllm:num_preemptions_created{engine="1",model_name="m"} 1e9\n'
    )
    assert bench.counted(text, "vllm:num_preemptions_total") == 7
    assert bench.counted(text, "minivllm:recomputed_tokens_total") == 0


class Server:
    """A server double whose load had 50 prompt tokens and 52 output tokens."""

    port = 1

    def loaded(self, asks):
        return dict.fromkeys(("duration", *self.kept), 1.0) | {"total_input_tokens": 50, "total_output_tokens": 52}


def test_what_is_wasted_is_a_share_of_all_that_was_computed(bench, monkeypatch):
    """Prompts of 50 tokens and outputs of 52 take at least 100 for two requests, since a last token
    is never computed.
    """
    counts = iter(
        [
            {"preemptions": 1, "recomputed_tokens": 10, "usage": 0},
            {"preemptions": 4, "recomputed_tokens": 60, "usage": 0},
        ]
    )
    monkeypatch.setattr(bench, "metrics", lambda port: next(counts))
    monkeypatch.setattr(bench, "watched", lambda port: contextlib.nullcontext([0.25, 0.75]))
    server = Server()
    server.kept = bench.KEPT
    result = bench.loaded(server, [None, None])
    assert (result["preemptions"], result["recomputed_tokens"]) == (3, 50)
    assert result["wasted"] == pytest.approx(50 / 150)
    assert (result["mean_usage"], result["most_usage"]) == (0.5, 0.75)
