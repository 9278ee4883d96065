"""A user's own file of lengths is read unchanged, and an error in it is reported in one line that
names the place.
"""

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm.errors import MinivllmError
from minivllm_simulate import length_files
from minivllm_simulate.workloads import RequestLengths, workload

COUNTS = st.integers(1, length_files.MOST_TOKENS)
ROWS = st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=30)
KEEP = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
HEADER = "prompt_tokens,output_tokens\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"


def write(folder: Path, text: str) -> str:
    path = folder / "own.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def pairs(requests: list[RequestLengths]) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in requests]


@given(
    rows=ROWS, ending=st.sampled_from(["\n", "\r\n"]), mark=st.sampled_from(["", "\ufeff"]), count=st.integers(1, 60)
)
@KEEP
def test_requests_come_in_the_files_order_and_its_means_are_counted(tmp_path, rows, ending, mark, count):
    lines = [" Input Len,id,OUTPUT_LEN", *(f"{prompt},0,{output}" for prompt, output in rows)]
    own = workload(write(tmp_path, mark + ending.join(lines) + ending))
    assert pairs(own.sample(count)) == [rows[index % len(rows)] for index in range(count)]
    prompts = sorted(prompt for prompt, _ in rows)
    for share in (0.0, 0.5, 0.99):
        tokens = own.prompt.quantile(share)
        assert tokens in prompts
        assert sum(prompt <= tokens for prompt in prompts) >= share * len(prompts)
    assert own.output.mean == sum(output for _, output in rows) / len(rows)


@pytest.mark.parametrize(("text", "rows"), [(AZURE, [(374, 44), (396, 109)]), (BURST, [(472, 18)])])
def test_the_columns_of_well_known_traces(tmp_path, text, rows):
    own = workload(write(tmp_path, text))
    assert pairs(own.sample(len(rows))) == rows
    assert own.title == "own.csv"


def test_a_request_that_failed_is_left_out_and_reported(tmp_path):
    own = workload(write(tmp_path, "input_len,output_len\n10,0\n\n20,5.0\n"))
    assert pairs(own.sample(2)) == [(20, 5), (20, 5)]
    assert "1 requests; 1 without a prompt or an output" in own.source


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
    name = write(tmp_path, f"{HEADER}10,20\n")
    first = workload(name)
    assert workload(name) is first
    write(tmp_path, f"{HEADER}30,20\n")
    os.utime(name, (time.time(), time.time() + 5))
    assert pairs(workload(name).sample(1)) == [(30, 20)]
    assert workload(name) != first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "own.csv, line 1: a column prompt_tokens"),
        ("alpha,beta\n1,2\n", "line 1: a column prompt_tokens .*ContextTokens.* is needed, but it has 'alpha, beta'"),
        (f"{HEADER}1,2\n3,many\n", "line 3: the output must be a number of tokens, not 'many'"),
        (f"{HEADER}-3,4\n", "line 2: the prompt must be a number of tokens, not '-3'"),
        (f"{HEADER}12\n", "line 2: 1 columns, but line 1 has 2"),
        (f"{HEADER}1,2.5\n", "line 2: .*2.5"),
        (f"{HEADER}3,99999999999\n", "line 2: the output has 99,999,999,999 tokens, more than"),
        (f"{HEADER}1,0\n0,4\n", r"no request with a prompt and an output \(2 rows have 0 tokens\)"),
        (f"{HEADER}{'1' * 5000},2\n", "line 2: the prompt must be"),
    ],
)
def test_an_error_names_its_place(tmp_path, text, words):
    assert_refused(words, workload, write(tmp_path, text))


@given(text=st.text(max_size=60) | st.binary(max_size=60))
@KEEP
def test_any_other_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "own.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    os.utime(path, (time.time(), time.time() + hash(text) % 10**6))
    with pytest.raises(MinivllmError) as refusal:
        workload(str(path))
    assert len(str(refusal.value).splitlines()) == 1


def test_more_rows_than_are_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(length_files, "MOST_ROWS", 3)
    assert len(workload(write(tmp_path, HEADER + "1,2\n" * 3)).sample(3)) == 3
    assert_refused("at most 3 requests are read; cut the file", workload, write(tmp_path, HEADER + "1,2\n" * 4))


def test_a_missing_file_or_name_is_refused(tmp_path):
    for name, words in {
        str(tmp_path / "missing.csv"): "there is no file",
        str(tmp_path): "there is no file",
        "~nobody-here/own.csv": "there is no file",
        "x" * 5000 + ".csv": "there is no file",
        "nul\0.csv": "there is no file",
        "poems": "unknown workload 'poems': use one of sharegpt, .* or the path of a CSV file",
    }.items():
        assert_refused(words, workload, name)
