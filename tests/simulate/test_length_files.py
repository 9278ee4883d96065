"""A user's own file of lengths is read unchanged, and an error in it is reported in one line that
names the place.
"""

import json
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
KEEP = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"


def write(folder: Path, text: str, name: str = "own.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def pairs(requests: list[RequestLengths]) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in requests]


@given(
    rows=ROWS,
    names=st.sampled_from(
        ["", "prompt_tokens{}output_tokens", "input_len{}output_len", " Input Length {}id{}OUTPUT_LEN"]
    ),
    parting=st.sampled_from([",", ";", "\t"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    blank=st.sampled_from(["", "\n"]),
)
@KEEP
def test_a_table_comes_back_as_it_was_written(tmp_path, rows, names, parting, ending, mark, blank):
    columns = names.count("{}") + 1
    lines = [names.replace("{}", parting)] * bool(names)
    lines += [parting.join(map(str, (prompt, *[0] * (columns - 2), output))) for prompt, output in rows]
    own = workload(write(tmp_path, mark + blank + ending.join(lines) + ending + blank))
    assert pairs(own.sample(len(rows))) == rows


@given(rows=ROWS)
@KEEP
def test_a_benchmarks_result_comes_back(tmp_path, rows):
    prompts, outputs = zip(*rows, strict=True)
    saved = {"date": "20260101", "input_lens": prompts, "output_lens": outputs, "ttfts": [0.1] * len(rows)}
    assert pairs(workload(write(tmp_path, json.dumps(saved), "own.json")).sample(len(rows))) == rows


@given(rows=ROWS, count=st.integers(1, 100), seed=st.integers(0, 5), share=st.floats(0, 1, exclude_max=True))
@KEEP
def test_requests_come_in_the_files_order_and_its_quantiles_and_means_are_counted(tmp_path, rows, count, seed, share):
    own = workload(write(tmp_path, "\n".join(f"{prompt},{output}" for prompt, output in rows)))
    assert pairs(own.sample(count, seed)) == [rows[index % len(rows)] for index in range(count)]
    prompts = [prompt for prompt, _ in rows]
    tokens = own.prompt.quantile(share)
    assert tokens in prompts
    assert sum(prompt <= tokens for prompt in prompts) >= share * len(prompts)
    assert own.output.mean == sum(output for _, output in rows) / len(rows)


@pytest.mark.parametrize(("text", "rows"), [(AZURE, [(374, 44), (396, 109)]), (BURST, [(472, 18)])])
def test_the_columns_of_well_known_traces(tmp_path, text, rows):
    own = workload(write(tmp_path, text))
    assert pairs(own.sample(len(rows))) == rows
    assert own.title == "own.csv"


def test_a_request_that_failed_is_left_out_and_said(tmp_path):
    own = workload(write(tmp_path, "input_len,output_len\n10,0\n20,5\n"))
    assert pairs(own.sample(2)) == [(20, 5), (20, 5)]
    assert "1 requests; 1 without a prompt or an output" in own.source


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
    name = write(tmp_path, "10,20\n")
    first = workload(name)
    assert workload(name) is first
    write(tmp_path, "30,20\n")
    os.utime(name, (time.time(), time.time() + 5))
    assert pairs(workload(name).sample(1)) == [(30, 20)]
    assert workload(name) != first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "own.csv, which is empty; a CSV file with a column prompt_tokens"),
        ("alpha,beta\n1,2\n", "line 1: a column prompt_tokens .*ContextTokens.* is needed, but it has 'alpha, beta'"),
        ("prompt_tokens,beta\n1,2\n", "one output_tokens"),
        ("1,2,3\n", "line 1: 3 columns without names"),
        ("1,2\n\n3,many\n", "line 3: the output must be a number of tokens, not 'many'"),
        ("1,2\n-3,4\n", "line 2: the prompt must be a number of tokens, not '-3'"),
        ("prompt_tokens,output_tokens\n12\n", "line 2: 1 columns, but line 1 has 2"),
        ("1,2.5\n", "line 1: .*2.5"),
        ("1,2\n3,99999999999\n", "line 2: 99,999,999,999 output tokens are more than"),
        ("1,0\n0,4\n", r"no request with a prompt and an output \(2 rows have 0 tokens\)"),
        ("1,2\n" + "1" * 5000 + ",2\n", "line 2: the prompt must be"),
        ("{", "not one JSON object"),
        ('{"input_lens": [1]}', "--save-result --save-detailed"),
        ('{"input_lens": [1], "output_lens": [1, 2]}', "1 input_lens and 2 output_lens"),
        ('{"input_lens": [1], "output_lens": [true]}', "request 1: the output must be a number of tokens, not True"),
        ('{"input_lens": [1], "output_lens": [null]}', "request 1: .* not None"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, words):
    assert_refused(words, workload, write(tmp_path, text))


@given(text=st.text(max_size=60) | st.binary(max_size=60))
@KEEP
def test_any_other_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "own.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    os.utime(path, (time.time(), time.time() + hash(text) % 10**6))
    refusal = ""
    try:
        assert workload(str(path)).sample(1)[0].total >= 2
    except MinivllmError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) <= 1


def test_more_rows_than_are_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(length_files, "MOST_ROWS", 3)
    assert len(pairs(workload(write(tmp_path, "1,2\n" * 3)).sample(3))) == 3
    with pytest.raises(MinivllmError, match="at most 3 requests are read; cut the file"):
        workload(write(tmp_path, "1,2\n" * 4))


def test_no_file_and_no_text(tmp_path):
    (tmp_path / "own.csv").write_bytes(b"\xff\xfe1,2")
    for name, words in {
        str(tmp_path / "missing.csv"): "there is no file",
        str(tmp_path): "there is no file",
        "~nobody-here/own.csv": "there is no file",
        "x" * 5000 + ".csv": "there is no file",
        "nul\0.csv": "there is no file",
        str(tmp_path / "own.csv"): "not a text file in UTF-8",
        "poems": "unknown workload 'poems': use one of sharegpt, .* or the path of a CSV file",
    }.items():
        with pytest.raises(MinivllmError, match=words) as refusal:
            workload(name)
        assert str(refusal.value).count(words) <= 1  # said once
