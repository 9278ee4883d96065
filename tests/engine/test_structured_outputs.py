"""Test that text under a constraint conforms to it on every path through the engine, and that
nothing else changes.
"""

import json
import re
import string
import threading
from concurrent.futures import Future

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm import LLM, MinivllmError, SamplingParams, StructuredOutputsParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.core.grammar import StructuredOutputRequest
from minivllm.structured_output.grammar_text import MOST_CHARACTERS, _closed, check_grammar
from minivllm.structured_output.manager import StructuredOutputManager
from minivllm_lab.engines.inside import core_of

pytestmark = pytest.mark.usefixtures("warm_processes")

PROMPT = "def add(a, b):\n    return"
SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "num_gpu_blocks_override": 150}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
FEW = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, **SETTINGS)


@pytest.fixture(scope="module")
def speculating():
    return LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=NGRAM)


def conforming(llm, constraints, **params):
    """Return the completions of one batch, one for each constraint, drawn at temperature 1."""
    common = {"temperature": 1.0, "max_tokens": 80, "seed": 5} | params
    wanted = [SamplingParams(structured_outputs=constraint, **common) for constraint in constraints]
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(wanted), wanted, use_tqdm=False)]


words = st.text(string.ascii_letters + "_é🙂\n\"\\'{}[], ", max_size=6)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}, st.integers(-99, 99)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(lambda options: {"enum": options}, st.lists(words | st.integers(-9, 9), min_size=1, max_size=3)),
)  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(
            lambda properties: PERSON | {"properties": properties, "required": list(properties)},
            st.dictionaries(st.text(string.ascii_lowercase, min_size=1, max_size=3), inner, max_size=2),
        ),
    ),
    max_leaves=4,
)
regexes = st.recursive(
    st.sampled_from(["a", "b", "[0-9]", "[^x]", "é", r"\.", " ", r"\{"]),
    lambda inner: st.one_of(
        st.builds(lambda item, other: f"{item}{other}", inner, inner),
        st.builds(lambda item, other: f"(?:{item}|{other})", inner, inner),
        st.builds(lambda item, least: f"(?:{item}){{{least},{least + 2}}}", inner, st.integers(0, 2)),
    ),
    max_leaves=5,
)  # fmt: skip


@FEW
@given(st.lists(schemas, min_size=5, max_size=5), st.integers(0, 1000))
def test_json_fits_its_schema(llm, speculating, drawn, seed):
    constraints = [StructuredOutputsParams(json=schema) for schema in drawn]
    result = conforming(llm, constraints, seed=seed)
    for schema, completion in zip(drawn, result, strict=True):
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
    assert any(completion.finish_reason == "stop" for completion in result)
    drafted = conforming(speculating, constraints, seed=seed)
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in result]


@FEW
@given(st.lists(regexes, min_size=5, max_size=5), st.lists(words, min_size=1, max_size=4), st.integers(0, 1000))
def test_a_text_fits_its_regex_and_a_choice_is_one_of_them(llm, speculating, drawn, choice, seed):
    constraints = [StructuredOutputsParams(regex=regex) for regex in drawn] + [StructuredOutputsParams(choice=choice)]
    result = conforming(llm, constraints, seed=seed)
    assert {completion.finish_reason for completion in result} == {"stop"}
    for regex, completion in zip(drawn, result, strict=False):
        assert re.fullmatch(regex, completion.text), (regex, completion.text)
    assert result[-1].text in choice
    drafted = conforming(speculating, constraints, seed=seed)
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in result]


CRAMPED = [
    {"speculative_config": NGRAM, "async_scheduling": False},
    {"speculative_config": NGRAM, "async_scheduling": True},
    {"pipeline_parallel_size": 2},
]


@pytest.fixture(scope="module", params=CRAMPED, ids=str)
def cramped(request):
    """Make an engine that chunks prompts, preempts and drafts at once; a pipeline has no drafts."""
    few = {"max_model_len": 88, "num_gpu_blocks_override": 12, "block_size": 8, "max_num_batched_tokens": 12}
    engine = LLM(EMBEDDED_MODEL, **SETTINGS | few | request.param)
    yield engine
    engine.llm_engine.shutdown()


ALL_KINDS = [
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex="(ab|cd ){2,9}x"),
    StructuredOutputsParams(grammar='root ::= item+\nitem ::= "x" | "yy, "'),
    StructuredOutputsParams(grammar='start: "f(" NUMBER ")"\nNUMBER: /[0-9]{1,3}/'),
    None,  # beside one that is free, and has drafts and steps ahead
]


def tokens_of_all_kinds(llm):
    """Return the tokens of two batches; the second finds cached blocks."""
    return [
        [completion.token_ids for completion in conforming(llm, ALL_KINDS, max_tokens=40, seed=seed)]
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def expected(llm):
    return tokens_of_all_kinds(llm)


def test_chunks_preemptions_and_drafts_change_no_token(expected, cramped):
    assert tokens_of_all_kinds(cramped) == expected
    stats = cramped.llm_engine.stats
    assert stats.num_preemptions > 0
    if cramped.llm_engine.engine_args.async_scheduling is False:  # else nothing is drafted where there is a grammar
        assert stats.spec_decoding_stats.num_accepted_tokens > 0


def test_several_completions_have_a_place_each(llm):
    params = SamplingParams(n=4, seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9}!"))
    texts = [output.text for output in llm.generate(PROMPT, params, use_tqdm=False)[0].outputs]
    assert all(re.fullmatch("[a-z]{3,9}!", text) for text in texts)
    assert len(set(texts)) > 1


WHITESPACE = [
    ({}, "[ 1 , 1 ]"),
    ({"disable_any_whitespace": True}, "[1,1]"),
    ({"whitespace_pattern": " {2}"}, "[  1  ,  1  ]"),
]


@pytest.mark.parametrize(("settings", "text"), WHITESPACE)
def test_whitespace_is_as_the_request_says(llm, settings, text):
    """The model would otherwise generate nothing but spaces."""
    two = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    [space] = llm.llm_engine.tokenizer.encode(" ", add_special_tokens=False).ids
    for schema in (two, json.dumps(two)):
        constraint = StructuredOutputsParams(json=schema, **settings)
        assert conforming(llm, [constraint], logit_bias={space: 100.0})[0].text == text


def test_any_number_of_choices(llm):
    choice = [f"label {number}" for number in range(3000)]
    assert conforming(llm, [StructuredOutputsParams(choice=choice)])[0].text in choice


def test_what_other_parameters_make_impossible_is_that_requests_error(llm):
    impossible = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["yes"]), bad_words=["y", "ye", "yes"], max_tokens=8
    )
    message = r"no token is left that fits the grammar [^\n]*$"
    assert_refused(rf"^prompt 0: {message}", llm.generate, PROMPT, impossible, use_tqdm=False)
    possible = SamplingParams(max_tokens=8, temperature=0.0)
    [alone] = llm.generate(PROMPT, possible, use_tqdm=False)
    first, failed, last = llm.generate([PROMPT] * 3, [possible, impossible, possible], use_tqdm=False)
    assert first.outputs[0].text == last.outputs[0].text == alone.outputs[0].text
    assert failed.outputs[0].finish_reason == "error"
    assert re.match(message, failed.outputs[0].error)
    assert conforming(llm, [StructuredOutputsParams(choice=["yes"])])[0].text == "yes"


def test_a_step_that_fails_between_forward_and_sampling_costs_only_its_requests(llm, monkeypatch):
    executor = core_of(llm).executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "sample_tokens", lambda grammar_output: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            conforming(llm, [StructuredOutputsParams(choice=["yes"])])
    assert conforming(llm, [StructuredOutputsParams(choice=["no"])])[0].text == "no"


def test_without_constraints_no_step_waits_for_a_grammar(llm, monkeypatch):
    monkeypatch.setattr(core_of(llm).executor, "sample_tokens", None)
    monkeypatch.setattr(core_of(llm).structured_outputs, "grammar_bitmask", None)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].finish_reason == "length"


MALFORMED = [
    ({"regex": "("}, "regex parse error"),
    ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
    ({"json": "{"}, "the constraint cannot be read"),
    ({"json": {"type": "string", "pattern": "("}}, "regex parse error"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": 'root ::= ("'}, "the constraint cannot be read"),
    ({"grammar": "root ::= " + "(" * 9000}, "the constraint cannot be read"),
    ({"regex": "a" * (MOST_CHARACTERS + 1)}, "at most 262,144 are served"),
    ({"json_object": True, "whitespace_pattern": "("}, "regex parse error"),
]


@pytest.mark.parametrize(("constraint", "message"), MALFORMED)
def test_a_malformed_constraint_is_one_line(llm, constraint, message):
    with pytest.raises(MinivllmError, match=message) as error:
        conforming(llm, [StructuredOutputsParams(**constraint)])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


NO_CONSTRAINTS = [
    ({}, "has no constraint"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice; give only one"),
    ({"choice": []}, "a list of strings, not empty"),
    ({"choice": "yes"}, "a list of strings"),
    ({"choice": ["\ud800"]}, "half a character"),
    ({"json": 1}, "must be a JSON schema"),
    ({"regex": 1}, "regex is 1; it must be a string"),
    ({"structural_tag": "{}"}, "it is not served here"),
    ({"json": {}, "disable_additional_properties": True}, "is not served"),
]


@pytest.mark.parametrize(("fields", "message"), NO_CONSTRAINTS)
def test_a_constraint_that_is_none_is_refused(fields, message):
    assert_refused(message, StructuredOutputsParams, **fields)


@pytest.mark.parametrize("link", ["rule", "definition"])
def test_a_long_chain_of_references_ends_no_process(link):
    """Each reference takes a few kB of native stack, so thousands of them would overflow one of the
    usual size.
    """
    if link == "rule":
        text = {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000)) + 'a9000: "x"'}
    else:
        chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(5000)}
        text = {"json": {"$defs": chain | {"a5000": {}}, "$ref": "#/$defs/a0"}}
    check_grammar(StructuredOutputsParams(**text))


def test_what_a_thread_raises_is_the_failure():
    future = Future()
    future.set_exception(OSError("no tokenizer"))
    assert StructuredOutputRequest(future).failure() == "the grammar could not be compiled: OSError: no tokenizer"


def test_others_are_served_while_a_grammar_is_compiled(llm, monkeypatch):
    compile_it = StructuredOutputManager._compile
    ended, other_is_served = [], threading.Event()

    def slowly(self, params):
        other_is_served.wait(30)
        return compile_it(self, params)

    engine = llm.llm_engine
    monkeypatch.setattr(StructuredOutputManager, "_compile", slowly)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), max_tokens=4)
    engine.add_request("constrained", PROMPT, constrained)
    engine.add_request("plain", PROMPT, SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
        if "plain" in ended:
            other_is_served.set()
    assert ended == ["plain", "constrained"]


def test_equal_grammars_are_compiled_once(llm):
    manager = core_of(llm).structured_outputs
    same = StructuredOutputsParams(regex="once[0-9]")
    conforming(llm, [same] * 3)
    assert manager._backend is not None
    num_compiled = manager._backend.compile_grammar.cache_info().misses
    conforming(llm, [same])
    assert manager._backend.compile_grammar.cache_info().misses == num_compiled


def test_an_object_has_only_the_properties_that_its_schema_names(llm):
    """A model of this size adds properties to an open object until its tokens run out."""
    nested = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema = {"type": "object", "properties": {"all": {"type": "array", "items": nested}}, "required": ["all"]}
    schema["properties"]["all"] |= {"minItems": 1, "maxItems": 2}
    constraints = [StructuredOutputsParams(json=nested), StructuredOutputsParams(json=schema)]
    for completion in conforming(llm, constraints):
        assert completion.finish_reason == "stop"
        closed = schema | {"additionalProperties": False} if "all" in completion.text else nested
        jsonschema.validate(json.loads(completion.text), closed)
        assert '"ok"' in completion.text


def test_schemas_that_describe_further_properties_stay_open():
    for schema in (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}},
        {"allOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
        {"type": "object"},
        {"enum": [{"properties": {"a": 1}}]},
        True,
    ):
        assert _closed(schema) == schema
    open_schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "object", "properties": {}}]}}}
    assert _closed(open_schema)["properties"]["a"]["anyOf"][0]["additionalProperties"] is False
    assert "additionalProperties" not in open_schema, "the caller's schema is left alone"
    named = {"type": "object", "properties": {"properties": {"type": "object"}, "default": open_schema}}
    closed = _closed(named)["properties"]
    assert set(closed) == {"properties", "default"}, "a property's name is no keyword"
    assert closed["default"]["additionalProperties"] is False
