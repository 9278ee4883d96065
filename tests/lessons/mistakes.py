"""The mistakes that the checks of an exercise must catch, from `NN_*/mistakes.toml`."""

import functools
import re
import tomllib
from pathlib import Path

from minivllm_lab.checks.mutants import Mutant

LESSONS = Path(__file__).parent
SAID = "what the checks say"
"""The table of messages; all others are functions of the script."""


@functools.cache
def _read(number: str) -> dict[str, dict]:
    (path,) = LESSONS.glob(f"{number}_*/mistakes.toml")
    return tomllib.loads(path.read_text())


def mutants_of(number: str) -> dict[str, Mutant]:
    """Return the wrong variants of a lesson's script, by the names of the mistakes."""
    return {
        mistake: (function, code, wrong)
        for function, places in _read(number).items()
        if function != SAID
        for code, mistakes in places.items()
        for mistake, wrong in mistakes.items()
    }


def messages_of(number: str) -> dict[str, re.Pattern[str]]:
    """Return, for some of the mistakes, a pattern of what a check then says."""
    return {
        mistake: re.compile(words["pattern"] if isinstance(words, dict) else re.escape(words))
        for mistake, words in _read(number)[SAID].items()
    }
