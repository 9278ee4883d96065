"""The calculator on the command line: its output, and one line with exit code 2 for bad input."""

import json

import pytest
from refusals import assert_refuses

from minivllm_lab import calculator
from minivllm_lab.cli import run
from minivllm_simulate.known_models import CONFIGS, HYBRIDS, known_model
from minivllm_simulate.memory import memory_ledger


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["calculator", *arguments])
    run(calculator.main, calculator.parser())


def test_prints_what_vllm_prints(monkeypatch, capsys):
    call(monkeypatch, "Qwen/Qwen3-8B", "--gpu", "H100", "--max-model-len", "32768")
    ledger = memory_ledger(known_model("Qwen3-8B"), "H100", max_model_len=32768)
    printed = capsys.readouterr().out
    assert f"GPU KV cache size: {ledger.tokens:,} tokens" in printed
    assert f"Maximum concurrency for 32,768 tokens per request: {ledger.concurrency:.2f}x" in printed


def test_reads_a_local_model(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-0.6B"]))
    call(monkeypatch, str(tmp_path), "--gpu", "T4", "--max-model-len", "4096", "--kv-cache-dtype", "fp8")
    assert "57,344 bytes a token" in capsys.readouterr().out


@pytest.mark.parametrize("name", HYBRIDS)
def test_models_whose_layers_differ_are_known_offline(monkeypatch, capsys, name):
    call(monkeypatch, name, "--gpu", "H200", "--max-model-len", "32768", "--tp", "2")
    ledger = memory_ledger(known_model(name), "H200", max_model_len=32768, tp=2)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"GPU KV cache size: {ledger.tokens:,} tokens" in printed
    assert f"Maximum concurrency for 32,768 tokens per request: {ledger.concurrency:.2f}x" in printed
    assert f"takes {ledger.kv.blocks_per_request(32768):,} blocks of {ledger.kv.block_bytes / 2**20:.2f} MiB" in printed
    assert "1 of full attention" in printed


def test_a_size_that_is_given_stands_for_weights_that_cannot_be_counted(monkeypatch, capsys, tmp_path):
    model = {"model_type": "got_ocr2", "text_config": CONFIGS["Qwen/Qwen3-0.6B"], "vision_config": {"model_type": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(SystemExit):
        call(monkeypatch, str(tmp_path), "--gpu", "L4")
    assert "vision_config are not counted" in capsys.readouterr().err
    call(monkeypatch, str(tmp_path), "--gpu", "L4", "--weights-gib", "3.5")
    assert "3.50" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("no-such-model",), ("./no/such/directory",), ("Qwen3-8B", "--gpu", "H900"), ("Qwen3-8B", "--tp", "3"),
        ("Qwen3-8B", "--tp", "two"), ("Qwen3-8B", "--kv-cache-dtype", "fp3"), ("Qwen3-8B", "--max-model-len", "0"),
        ("Qwen3-8B", "--block-size", "0"), ("Qwen3-8B", "--gpu", "T4"), ("Qwen3-8B", "--gpu-memory-utilization", "7"),
        ("Llama-3.1-8B", "--gpu", "L4"), ("Llama-2-7b-hf", "--max-model-len", "8192"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments):
    assert_refuses(calculator, *arguments, about="error: ")
