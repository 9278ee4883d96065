"""Test that every field of a client's `kv_transfer_params` is checked, and that vLLM's own answers
pass.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm.errors import MinivllmError
from minivllm.kv_connector.pull_params import RemotePrefill, check_flags, digest

ANSWER = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "890d8357-40c6-4197-88bd-fc8b8f950f35", "remote_request_id": "cmpl-req-1-0-ac5fa5b5",
    "remote_host": "127.0.0.1", "remote_port": 5601, "remote_num_tokens": 473, "remote_blocks_expiry_time": None,
    "remote_prefill_cached_tokens": 0, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "transfer_mode": "pull",
}  # fmt: skip
"""As vLLM 0.32.0 answers it."""


def test_an_answer_of_vllm_is_read():
    assert RemotePrefill.of(ANSWER) == RemotePrefill(
        ANSWER["remote_engine_id"], ANSWER["remote_request_id"], "127.0.0.1", 5601, ((1, 2, 3, 4),), 473
    )


NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
NONE_OF_THEM = [
    None, "", [], -1, True, 1.5, {"a": 1}, [["1"]], [[True]], [[-1]], [[1], [2]], [[7, 8, 7]], [7, 8], 70000,
    [[1 << 40]],
]  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_a_value_that_is_missing_or_none_is_refused_by_name(key):
    missing = {name: value for name, value in ANSWER.items() if name != key}
    for answer in (missing, *(ANSWER | {key: value} for value in NONE_OF_THEM)):
        assert_refused(key, RemotePrefill.of, answer)
    assert_refused("not valid text", RemotePrefill.of, ANSWER | {key: "\ud800"})


def test_what_may_be_missing_may_and_a_clients_longest_id_passes():
    assert RemotePrefill.of({key: ANSWER[key] for key in NEEDED}).num_tokens is None
    longest = f"chatcmpl-{'é' * 1024}-2047-{1 << 62}"
    assert RemotePrefill.of(ANSWER | {"remote_request_id": longest}).request_id == longest
    assert_refused("remote_num_tokens", RemotePrefill.of, ANSWER | {"remote_num_tokens": -1})


def test_a_digest_is_of_the_tokens_and_not_of_the_machine():
    assert digest([1, 2, 3]) == "abccad42d03c940bc2b249bf5a4e1e3d"
    assert len({digest(tokens) for tokens in ([], [0], [0, 0], [1], [256], [1, 0], [0, 1])}) == 7
    assert RemotePrefill.of(ANSWER).is_of([7]), "vLLM tells none"


def test_flags():
    assert check_flags({}) == (False, False)
    assert check_flags({"do_remote_decode": True, "do_remote_prefill": None}) == (False, True)
    both = {"do_remote_prefill": True, "do_remote_decode": True}
    for wrong in ({"do_remote_prefill": 1}, {"do_remote_decode": "yes"}, both):
        assert_refused("do_remote", check_flags, wrong)


SCALARS = st.sampled_from((None, True, False, 0, 1, -1, 1 << 70, 1.5, float("nan"), "", "x", "a\nb" * 1000))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(ANSWER)), JSON, max_size=4))
def test_any_value_is_read_or_refused_in_one_line(changed):
    message = ""
    result = RemotePrefill("", "", "", 0, ())
    try:
        result = RemotePrefill.of(ANSWER | changed)
    except MinivllmError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 250
    assert all(type(block_id) is int and block_id >= 0 for group in result.block_ids for block_id in group)
