"""The benchmark of preemption: what it reads of a server's metrics, and what it says of a pool."""

import contextlib
import json

import pytest


@pytest.fixture(scope="module")
def benchmark(load_benchmark):
    return load_benchmark("preemption")


def test_a_metric_is_the_sum_over_all_cores(benchmark):
    text = (
        "# HELP vllm:num_preemptions_total Preemptions.\n"
        'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="m"} 4.0\n'
        'vllm:num_preemptions_created{engine="1",model_name="m"} 1e9\n'
    )
    assert benchmark.counted(text, "vllm:num_preemptions_total") == 7
    assert benchmark.counted(text, "minivllm:recomputed_tokens_total") == 0


def test_a_part_joins_what_the_file_has_of_the_other(benchmark, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"figures": {"waste": 1, "cliff": 2}}))
    assert benchmark.joined(str(path), {"figures": {"cliff": 3}}) == {"figures": {"waste": 1, "cliff": 3}}
    assert benchmark.joined(None, {"figures": {"cliff": 3}}) == {"figures": {"cliff": 3}}


class Server:
    """Answers as a server would that computed 40 tokens again."""

    port = 1

    def loaded(self, asks):
        return dict.fromkeys(("duration", *self.kept), 1.0) | {"total_input_tokens": 50, "total_output_tokens": 52}


def test_what_is_wasted_is_a_share_of_all_that_was_computed(benchmark, monkeypatch):
    """Of two requests with 50 and 52 tokens, 100 are computed at least: a last token never is."""
    counts = iter(
        [
            {"preemptions": 1, "recomputed_tokens": 10, "usage": 0},
            {"preemptions": 4, "recomputed_tokens": 60, "usage": 0},
        ]
    )
    monkeypatch.setattr(benchmark, "metrics", lambda port: next(counts))
    monkeypatch.setattr(benchmark, "watched", lambda port: contextlib.nullcontext([0.25, 0.75]))
    server = Server()
    server.kept = benchmark.KEPT
    found = benchmark.loaded(server, [None, None])
    assert (found["preemptions"], found["recomputed_tokens"]) == (3, 50)
    assert found["wasted"] == pytest.approx(50 / 150)
    assert (found["mean_usage"], found["most_usage"]) == (0.5, 0.75)


def test_the_tables_name_pools_and_victims(benchmark, capsys):
    one = dict.fromkeys((*benchmark.KEPT, "preemptions", "wasted", "mean_usage"), 0.5)
    work = {"requests": 60, "input": 64, "output": 192, "range_ratio": 0.75}
    benchmark.show_cliff({"pools": {"128": one}, "filled": 64.0, "most_filled": 70.0, "rate": 3.0, "work": work})
    shares = {"400": {"share": 0.25}}
    rules = {"last in": {"first_chunk": shares, "whole": shares}}
    benchmark.show_waste({"published": {"400": 0.788}, "rules": rules})
    out = capsys.readouterr().out
    assert "2.00" in out
    assert "78.8%" in out
    assert "25.0%" in out
