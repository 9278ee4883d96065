"""Request lengths from the user's own file: a CSV table with a column of prompt lengths and one of
output lengths, and perhaps one of arrivals.

The columns may be named as in well-known benchmarks and traces (Azure's TIMESTAMP, ContextTokens
and GeneratedTokens, BurstGPT's "Request tokens" and "Response tokens"). Rows without a prompt or
without an output are left out: traces and benchmarks write 0 for requests that failed.
"""

import csv
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from minivllm.config.checks import require
from minivllm.errors import MinivllmError

MOST_ROWS, MOST_TOKENS = 1_000_000, 2**24
PROMPT_NAMES = ("prompttokens", "inputtokens", "inputlen", "contexttokens", "requesttokens")
OUTPUT_NAMES = ("outputtokens", "outputlen", "generatedtokens", "completiontokens", "responsetokens")
ARRIVAL_NAMES = ("arrival", "arrivaltime", "timestamp")
WANTED = "a column prompt_tokens (or input_len, ContextTokens) and one output_tokens (or output_len, GeneratedTokens)"


@dataclass(frozen=True, eq=False)
class LengthTable:
    """Prompt and output tokens of each request, in the file's order; at least one request.

    The same version of a file always gives the same object, so tables can be compared and used as
    cache keys.
    """

    path: Path
    prompts: Sequence[int]
    outputs: Sequence[int]
    left_out: int
    """Rows without a prompt or without an output."""
    arrivals: Sequence[float] = ()
    """Seconds from the first arrival, in ascending order; empty if the file has no such column."""


def is_path(name: str) -> bool:
    """Return whether `name` looks like a path to a file, rather than a word."""
    return name.lower().endswith(".csv") or "/" in name or "\\" in name


def read_lengths(name: str) -> LengthTable:
    """Return the lengths in a file; a file that has not changed is not read again.

    Raises:
        MinivllmError: there is no such file, or it has no lengths; the message names the line and
            what is wanted.
    """
    try:
        path = Path(name).expanduser().resolve(strict=True)
        require(path.is_file(), f"there is no file {name!r}")
        return _read(path, path.stat().st_mtime_ns)
    except UnicodeDecodeError:
        raise MinivllmError(f"{path.name} is not a text file in UTF-8; give a CSV file") from None
    except csv.Error as error:
        raise MinivllmError(f"{path.name} cannot be read: {error}") from None
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a null character, an unknown home
        raise MinivllmError(f"there is no file {name[:80]!r}: {error}") from None


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> LengthTable:
    """Read a file; `modified` serves only to tell its versions apart in the cache."""
    del modified
    prompts, outputs, moments, left_out = array("l"), array("l"), array("d"), 0
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for where, prompt, output, arrival in _rows(path.name, lines):
            counts = _tokens(prompt, f"{where}: the prompt"), _tokens(output, f"{where}: the output")
            if not all(counts):
                left_out += 1
                continue
            require(len(prompts) < MOST_ROWS, f"{where}: at most {MOST_ROWS:,} requests are read; cut the file")
            prompts.append(counts[0])
            outputs.append(counts[1])
            if arrival is not None:
                moments.append(_moment(arrival, f"{where}: the arrival"))
    require(len(prompts) > 0, f"{path.name} has no request with a prompt and an output ({left_out} rows have 0 tokens)")
    if moments:
        order = sorted(range(len(moments)), key=moments.__getitem__)
        prompts, outputs = (array("l", (column[index] for index in order)) for column in (prompts, outputs))
        moments = array("d", (moments[index] - moments[order[0]] for index in order))
    return LengthTable(path, prompts, outputs, left_out, moments)


def _rows(file: str, lines: Iterable[str]) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield (where, prompt, output, arrival) for each row below the header; None: there is no such
    column.
    """
    reader = csv.reader(lines)
    names = ["".join(filter(str.isalnum, name)).lower() for name in next(reader, [])]
    prompt, output, arrival = (
        next((names.index(name) for name in known if name in names), -1)
        for known in (PROMPT_NAMES, OUTPUT_NAMES, ARRIVAL_NAMES)
    )
    require(min(prompt, output) >= 0, f"{file}, line 1: {WANTED} is needed, but it has {', '.join(names)[:60]!r}")
    for row in filter(None, reader):
        where = f"{file}, line {reader.line_num}"
        require(len(row) == len(names), f"{where}: {len(row)} columns, but line 1 has {len(names)}")
        yield where, row[prompt], row[output], None if arrival < 0 else row[arrival]


def _moment(text: str, what: str) -> float:
    """Return a moment in seconds: a number, or a date and time."""
    try:
        moment = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip()).timestamp()
        except ValueError:
            raise MinivllmError(f"{what} must be seconds or a date and time, not {text[:40]!r}") from None
    require(0 <= moment < 1e12, f"{what} must be 0 seconds or later, not {text[:40]!r}")
    return moment


def _tokens(text: str, what: str) -> int:
    count = text.strip().removesuffix(".0")
    is_count = count.isascii() and count.isdigit() and len(count) < 20
    require(is_count, f"{what} must be a number of tokens, not {text[:40]!r}")
    require(int(count) <= MOST_TOKENS, f"{what} has {int(count):,} tokens, more than {MOST_TOKENS:,}")
    return int(count)
