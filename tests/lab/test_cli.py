"""Test the argument types that scripts share, and that no log line comes between tables."""

import argparse
import logging
import os
import sys
from types import SimpleNamespace

import pytest
from refusals import assert_refuses

from minivllm.logger import LEVEL_VARIABLE, init_logger
from minivllm_lab.cli import Parser, positive_int, run, seed, whole_number


def test_both_limits_are_allowed():
    assert [whole_number(2, 5)(text) for text in ("2", "5")] == [2, 5]
    assert positive_int("1") == 1
    assert positive_int("123456789") == 123456789


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (whole_number(2, 5), "1", "from 2 to 5, got 1"),
        (whole_number(2, 5), "6", "from 2 to 5, got 6"),
        (seed, "-1", "from 0 to 4294967295, got -1"),
        (positive_int, "0", "at least 1, got 0"),
        (positive_int, "2.5", "'2.5' is not a whole number"),
        (seed, "99999999999999999999999", "from 0 to 4294967295"),
    ],
)
def test_anything_else_is_refused(parse, text, words):
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        parse(text)
    assert words in str(refusal.value)


def test_text_that_is_not_utf_8_is_refused():
    """A shell passes such bytes on, and Python makes lone surrogates of them, which no tokenizer
    accepts.
    """
    parser = Parser(prog="script")
    parser.add_argument("--prompt")
    program = SimpleNamespace(main=print, parser=lambda: parser)
    assert_refuses(program, "--prompt", "soup\udce7on", about="--prompt is not valid text: it has half a character")


@pytest.mark.parametrize(("asked", "level"), [(None, "WARNING"), ("DEBUG", "INFO")])
def test_a_script_logs_warnings_only_unless_more_is_asked_for(asked, level, monkeypatch):
    """The logger is configured when the engine is imported, before `run` is called."""
    logger = init_logger("minivllm")
    before = logger.level
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setenv(LEVEL_VARIABLE, asked or "")
    if asked is None:
        monkeypatch.delenv(LEVEL_VARIABLE)
    logger.setLevel("INFO")
    seen = []
    try:
        run(lambda arguments: seen.append((logging.getLevelName(logger.level), os.environ[LEVEL_VARIABLE])), Parser())
        assert seen == [(level, asked or "WARNING")]
        assert (logger.level, os.environ.get(LEVEL_VARIABLE)) == (logging.INFO, asked), "a caller keeps its own level"
    finally:
        logger.setLevel(before)
