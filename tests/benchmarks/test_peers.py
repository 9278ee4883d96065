"""Test how the engines of `make peers` are started and compared."""

import sys
from pathlib import Path

import pytest
from refusals import assert_refused

ENGINE = """
import json, sys
print(json.dumps({"ready": {"version": "1"}}), flush=True)
requests = json.loads(open(sys.argv[1]).read())["requests"]
for line in sys.stdin:
    chosen = requests[: int(line)]
    outputs = [[7] * request["output"] for request in chosen]
    print(json.dumps({"seconds": 0.5 * len(chosen), "outputs": outputs}), flush=True)
"""
REFUSES = 'raise SystemExit("no bf16 here")'
ENDS = f"{ENGINE}    {REFUSES}"  # after its first answer
WORK = {"requests": [{"prompt": [1], "output": 2}, {"prompt": [1], "output": 3}]}


@pytest.fixture
def peers(load_benchmark, monkeypatch):
    benchmark = load_benchmark("peers")
    monkeypatch.setattr(benchmark.time, "sleep", lambda seconds: None)
    return benchmark


def peer(peers, tmp_path: Path, name: str, code: str):
    script = tmp_path / f"{name}.py"
    script.write_text(code)
    return peers.Peer(f"{name} fp32", str(script), "float32", python=Path(sys.executable))


def test_rates_are_medians_by_number_of_requests(peers, tmp_path):
    slower = ENGINE.replace("0.5 *", "1.0 *")
    engines = [peer(peers, tmp_path, "minivllm", ENGINE), peer(peers, tmp_path, "other", slower)]
    rows, outputs = peers.measure(engines, WORK, (1, 2), 1, tmp_path)
    assert rows["other fp32"]["rates"] == {"1": 2.0, "2": 2.5}
    assert rows["other fp32"]["ours_of_it"] == {"1": 2.0, "2": 2.0}
    assert outputs["other fp32"] == [[7, 7], [7, 7, 7]]


@pytest.mark.parametrize("code", [REFUSES, ENDS], ids=["refuses", "ends"])
def test_a_peer_that_fails_is_left_out_with_its_reason(peers, tmp_path, capsys, code):
    engines = [peer(peers, tmp_path, "minivllm", ENGINE), peer(peers, tmp_path, "other", code)]
    engines.append(peer(peers, tmp_path, "third", ENGINE))
    rows, _ = peers.measure(engines, WORK, (1, 2), 2, tmp_path)
    assert list(rows) == ["minivllm fp32", "third fp32"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "left out: other fp32 ended without an answer" in printed
    assert "no bf16 here" in printed


def test_our_engine_is_measured_where_no_other_is_installed(peers, tmp_path):
    rows, outputs = peers.measure([peer(peers, tmp_path, "minivllm", ENGINE)], WORK, (1, 2), 1, tmp_path)
    assert rows["minivllm fp32"]["rates"] == {"1": 4.0, "2": 5.0}
    assert outputs == {"minivllm fp32": [[7, 7], [7, 7, 7]]}


@pytest.mark.parametrize("code", [REFUSES, ENDS], ids=["refuses", "ends"])
def test_our_engine_must_not_fail(peers, tmp_path, code):
    engines = [peer(peers, tmp_path, "minivllm", code), peer(peers, tmp_path, "other", ENGINE)]
    assert_refused("no bf16 here", peers.measure, engines, WORK, (1, 2), 1, tmp_path)
