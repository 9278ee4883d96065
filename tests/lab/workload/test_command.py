"""The command: loads from files, a comparison, and one line with exit code 2 for bad input."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import assert_refuses

from minivllm_lab.cli import run
from minivllm_lab.workload.__main__ import parser
from minivllm_lab.workload.load import of_bench, of_kind
from minivllm_lab.workload.report import report

COMMAND = SimpleNamespace(main=report, parser=parser)
BENCH = {
    "model_id": "meta-llama/Llama-3.1-8B-Instruct", "completed": 3, "duration": 1.5, "total_input_tokens": 300,
    "total_output_tokens": 60, "request_rate": "inf", "max_concurrency": 2, "burstiness": 1.0,
    "request_throughput": 2.0, "output_throughput": 40.0, "median_ttft_ms": 20.0, "p99_ttft_ms": 30.0,
    "median_itl_ms": 6.5, "p99_itl_ms": 9.0, "mean_tpot_ms": 6.6,
}  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["workload", *arguments])
    run(report, parser())


def bench(folder: Path, **changes: object) -> str:
    path = folder / "result.json"
    path.write_text(json.dumps({key: value for key, value in (BENCH | changes).items() if value is not None}))
    return str(path)


def test_a_benchmark_s_result_is_a_load_and_a_comparison(monkeypatch, capsys, tmp_path):
    name = bench(tmp_path)
    call(monkeypatch, "Llama-3.1-8B", "--load", name, "--compare", name)
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 requests from 2 clients" in printed
    assert "100 tokens in and 20 out" in printed
    assert "Beside result.json" in printed
    assert "knee, requests/s" in printed
    assert "± " in printed


def test_a_detailed_result_brings_its_own_lengths(tmp_path):
    load = of_bench(bench(tmp_path, input_lens=[50, 100, 150], output_lens=[10, 20, 30], request_rate=4.0))
    assert [request.prompt_tokens for request in load.requests] == [50, 100, 150]
    assert (load.rate, load.clients) == (4.0, None)


def test_a_table_with_arrivals_arrives_as_it_says(tmp_path):
    path = tmp_path / "trace.csv"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path.write_text(f"{header}\n2023-11-16 18:17:05.5,30,4\n2023-11-16 18:17:03.5000000,10,2\n")
    load = of_kind(str(path), 9, None, None)
    assert [(each.prompt_tokens, each.arrival) for each in load.requests] == [(10, 0), (30, 2)]
    assert load.rate == pytest.approx(0.5)
    assert [each.arrival for each in of_kind(str(path), 3, None, 1).requests] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Lama-3.1-8B",), "nearest: Llama-3.1-8B"),
        (("Llama-3.1-8B", "--gpu", "H20"), "nearest: H200, H100"),
        (("Llama-3.1-70B", "--gpu", "H100"), "nothing is left for the KV cache"),
        (("Llama-3.1-8B", "--load", "1024:0"), "lengths must be above 0"),
        (("Llama-3.1-8B", "--load=-3:10"), "give PROMPT:OUTPUT"),
        (("Llama-3.1-8B", "--load", "chatter"), "one of sharegpt"),
        (("Llama-3.1-8B", "--load", "nowhere.csv"), "there is no file"),
        (("Llama-3.1-8B", "--load", "nowhere.json"), "there is no file"),
        (("Llama-3.1-8B", "--vllm", "0.5.4"), "0.6 to 0.33"),
        (("Llama-3.1-8B", "--rate", "-1"), "above 0 requests/s"),
        (("Llama-3.1-8B", "--rate", "1", "--clients", "2"), "not both"),
        (("Llama-3.1-8B", "--gpu-memory-utilization", "1.5"), "at most 1"),
        (("Llama-3.1-8B", "--tp", "3"), "cannot be divided"),
        ((), "give a model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    assert_refuses(COMMAND, *arguments, about=words)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("old.json", json.dumps({"dur": 3}), "it has no model_id"),
        ("list.json", "[1]", "is not a result of"),
        ("cut.json", '{"model_id":', "is not a JSON file"),
        ("none.json", json.dumps(BENCH | {"completed": 0}), "no request was completed"),
        ("minus.json", json.dumps(BENCH | {"input_lens": [-4], "output_lens": [3]}), "at least 1"),
        ("rate.json", json.dumps(BENCH | {"request_rate": "fast"}), "request_rate is 'fast'"),
        ("when.csv", "arrival,prompt_tokens,output_tokens\nsoon,5,3\n", "must be seconds or a date"),
        ("early.csv", "arrival,prompt_tokens,output_tokens\n-2,5,3\n", "must be 0 seconds or later"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    assert name in assert_refuses(COMMAND, "Llama-3.1-8B", "--load", str(tmp_path / name), about=words)
