"""The followed request: what is recorded is what the engine did, and what the lessons say about
it.
"""

import logging

import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.pictures.followed import BLOCK_SIZE, MAX_TOKENS, NAME, PROMPT, SCENES, Token, followed

EVERY_SCENE = pytest.mark.parametrize("scene", SCENES)


def test_the_request_is_the_one_that_the_lessons_show():
    request = followed().request
    assert "".join(token.text for token in request.prompt) == PROMPT
    assert [token.shown for token in request.prompt] == ["def", "␣add", "(", "a", ",", "␣b", "):", "⏎→", "␣return"]
    assert "".join(token.text for token in request.output) == " a + b\n\ndef"
    assert len(request.output) == MAX_TOKENS


@EVERY_SCENE
def test_the_engine_says_the_same_when_it_is_asked_as_users_do(scene):
    run = followed(scene)
    llm = LLM(EMBEDDED_MODEL, device="cpu", dtype="float32", max_model_len=32)
    prompts = [prompt for _, _, prompt in SCENES[scene]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    assert [[token.id for token in served.output] for served in run.requests.values()] == [
        list(output.outputs[0].token_ids) for output in outputs
    ]


@EVERY_SCENE
def test_rows_are_what_a_reader_can_work_out(scene):
    run = followed(scene)
    computed = dict.fromkeys(run.requests, 0) | ({"print": 8} if scene == "prefix hit" else {})
    for index, step in enumerate(run.steps):
        assert step.index == index
        assert step.query_start_loc[-1] == sum(row.num_scheduled_tokens for row in step.rows)
        assert step.query_start_loc[-1] <= run.max_num_batched_tokens
        for row, start in zip(step.rows, step.query_start_loc, strict=False):
            tokens = run.requests[row.request].tokens
            assert row.query_start == start
            if index and row.request in run.steps[index - 1].waiting and computed[row.request]:
                assert row.num_computed_tokens < computed[row.request], "preempted: what it found of its own blocks"
                assert row.num_computed_tokens % BLOCK_SIZE == 0
                computed[row.request] = row.num_computed_tokens
            assert row.num_computed_tokens == computed[row.request]
            assert row.seq_len == row.num_computed_tokens + row.num_scheduled_tokens
            assert row.positions == tuple(range(row.num_computed_tokens, row.seq_len))
            assert row.tokens == tokens[row.num_computed_tokens : row.seq_len]
            assert len(row.block_table) == -(-row.seq_len // BLOCK_SIZE)
            places = (divmod(position, BLOCK_SIZE) for position in row.positions)
            assert row.slots == tuple(row.block_table[block] * BLOCK_SIZE + place for block, place in places)
            ends = row.seq_len >= len(run.requests[row.request].prompt)
            assert row.sampled == (tokens[row.seq_len] if ends else None)
            computed[row.request] = row.seq_len
    assert computed == {name: len(served.tokens) - 1 for name, served in run.requests.items()}, "but the last token"


def test_in_company_a_decode_a_prompt_and_a_chunk_share_a_step():
    run = followed("company")
    assert [(row.request, row.num_scheduled_tokens) for row in run.steps[1].rows] == [
        ("add", 1),
        ("for", 5),
        ("class", 6),
    ]
    assert run.steps[1].query_start_loc == (0, 1, 6, 12)
    assert run.steps[1].row("class").sampled is None
    assert run.steps[4].row().block_table == (1, 2, 3, 9), "the others took the blocks in between"
    assert followed().steps[4].row().block_table == (1, 2, 3, 4)


def test_a_prefix_hit_shares_two_blocks_and_computes_one_token():
    run = followed("prefix hit")
    first = run.steps[2].row("print")
    assert (first.num_computed_tokens, first.num_scheduled_tokens) == (8, 1)
    assert first.block_table[:2] == run.steps[2].row().block_table[:2] == (1, 2)
    assert first.block_table[2] != run.steps[2].row().block_table[2]
    assert run.steps[0].cached_blocks.keys() == {1, 2}, "only full blocks are named"


def test_blanks_can_be_seen():
    assert [Token(0, piece).shown for piece in (" a", "\n   ", "\n", "    ")] == ["␣a", "⏎→", "⏎", "→"]


def test_it_logs_nothing_between_the_pictures_of_a_notebook(capfd):
    followed.cache_clear()
    level = logging.getLogger("minivllm").level
    followed()
    assert capfd.readouterr().err == ""
    assert logging.getLogger("minivllm").level == level


def test_in_the_small_pool_it_is_preempted_and_finds_two_blocks_again():
    run = followed("small pool")
    rows = [step.row() for step in run.steps]
    gone = [index for index, step in enumerate(run.steps) if NAME in step.waiting]
    assert gone == [3, 4, 5]
    back = rows[6]
    assert back is not None
    assert (back.num_computed_tokens, back.num_scheduled_tokens) == (8, 3)
    assert run.request.output == followed().request.output
