"""Request lengths from the user's own file: a CSV table, or what `vllm bench serve` saves.

A table has a column of prompt lengths and one of output lengths. Their names may be spelled as in
well-known benchmarks and traces (Azure's ContextTokens and GeneratedTokens, BurstGPT's "Request
tokens" and "Response tokens"); without a header line, the table has exactly two columns. The JSON
is that of `vllm bench serve --save-result --save-detailed`, with its lists `input_lens` and
`output_lens`.

Rows without a prompt or without an output are left out: traces and benchmarks write 0 for requests
that failed.
"""

import csv
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from minivllm.config.checks import is_count, require
from minivllm.errors import MinivllmError

MOST_ROWS, MOST_TOKENS, MOST_BYTES = 1_000_000, 2**24, 2**28
PROMPT_NAMES = (
    "prompt_tokens", "prompt_len", "prompt_length", "input_tokens", "input_len", "input_lens", "input_length",
    "context_tokens", "request_tokens", "num_prompt_tokens", "num_prefill_tokens", "prompt", "input",
)  # fmt: skip
OUTPUT_NAMES = (
    "output_tokens", "output_len", "output_lens", "output_length", "generated_tokens", "completion_tokens",
    "response_tokens", "num_output_tokens", "num_decode_tokens", "completion", "output",
)  # fmt: skip
WANTED = "a column prompt_tokens (or input_len, ContextTokens) and one output_tokens (or output_len, GeneratedTokens)"
COUNT = re.compile(r"[0-9]{1,12}(\.0*)?", re.ASCII)


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


def is_path(name: str) -> bool:
    """Return whether `name` looks like a path to a file, rather than a word."""
    return Path(name).suffix.lower() in (".csv", ".json", ".tsv", ".txt") or "/" in name or "\\" in name


def read_lengths(name: str) -> LengthTable:
    """Return the lengths in a file; a file that has not changed is not read again.

    Raises:
        MinivllmError: there is no such file, or it has no lengths; the message names the line and
            what is wanted.
    """
    try:
        path = Path(name).expanduser()
        is_file = path.is_file()
        status = path.stat() if is_file else None
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a null character, an unknown home
        raise MinivllmError(f"there is no file {name[:80]!r}: {error}") from None
    if status is None:
        raise MinivllmError(f"there is no file {name!r}")
    require(status.st_size <= MOST_BYTES, f"{name} is larger than {MOST_BYTES // 2**20} MiB; use a part of it")
    return _read(path.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, modified: int, size: int) -> LengthTable:
    """Read a file. `modified` and `size` serve only to tell its versions apart in the cache."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            beginning = lines.read(256).lstrip()
            lines.seek(0)
            rows = _json_rows(lines.read()) if beginning.startswith("{") else _table_rows(lines)
            return _collected(path, rows)
    except UnicodeDecodeError:
        raise MinivllmError(f"{path.name} is not a text file in UTF-8; give a CSV or a JSON file") from None
    except (OSError, csv.Error, RecursionError) as error:
        raise MinivllmError(f"{path.name} cannot be read: {error}") from None
    except MinivllmError as error:
        raise MinivllmError(f"{path.name}, {error}") from None


def _collected(path: Path, rows: Iterable[tuple[str, Any, Any]]) -> LengthTable:
    prompts, outputs, left_out = array("l"), array("l"), 0
    for where, prompt, output in islice(rows, MOST_ROWS + 1):
        pair = _tokens(prompt, where, "prompt"), _tokens(output, where, "output")
        if not all(pair):
            left_out += 1
            continue
        prompts.append(pair[0])
        outputs.append(pair[1])
    too_many = len(prompts) + left_out > MOST_ROWS
    require(not too_many, f"line {MOST_ROWS + 1:,} and beyond: at most {MOST_ROWS:,} requests are read; cut the file")
    require(len(prompts) > 0, f"which has no request with a prompt and an output ({left_out} rows have 0 tokens)")
    return LengthTable(path, prompts, outputs, left_out)


def _tokens(value: Any, where: str, label: str) -> int:
    written = isinstance(value, str) and COUNT.fullmatch(value.strip())
    count: Any = int(value.strip().split(".")[0]) if written else value
    if not is_count(count, 0):
        raise MinivllmError(f"{where}: the {label} must be a number of tokens, not {_shown(value)}")
    if count > MOST_TOKENS:
        raise MinivllmError(f"{where}: {count:,} {label} tokens are more than {MOST_TOKENS:,}")
    return count


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _table_rows(lines: Iterator[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (where, prompt, output) for each row; columns are separated by commas, semicolons or
    tabs.
    """
    top, first = next(((number, line) for number, line in enumerate(lines, 1) if line.strip()), (1, ""))
    require(bool(first), f"which is empty; a CSV file with {WANTED} is needed")
    parting = max(",;\t", key=first.count)
    names = next(csv.reader([first], delimiter=parting))
    if unnamed := all(COUNT.fullmatch(name.strip()) for name in names):
        require(len(names) == 2, f"line {top}: {len(names)} columns without names; give two, or {WANTED}")
    prompt, output = (0, 1) if unnamed else (_column(names, known, top) for known in (PROMPT_NAMES, OUTPUT_NAMES))
    if unnamed:
        yield f"line {top}", names[0], names[1]
    reader = csv.reader(lines, delimiter=parting)
    for row in reader:
        where = f"line {top + reader.line_num}"
        if not any(cell.strip() for cell in row):
            continue
        require(len(row) > max(prompt, output), f"{where}: {len(row)} columns, but line {top} has {len(names)}")
        yield where, row[prompt], row[output]


def _column(names: Sequence[str], known: Sequence[str], line: int) -> int:
    """Return the column that matches the first possible name in `known`, ignoring case, spaces and
    underscores.
    """
    plain = [_plain(name) for name in names]
    column = next((_plain(name) for name in known if _plain(name) in plain), None)
    if column is None:
        raise MinivllmError(f"line {line}: {WANTED} is needed, but it has {_shown(', '.join(names))}")
    return plain.index(column)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _json_rows(text: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (where, prompt, output) for each request in a result of `vllm bench serve`."""
    try:
        result = json.loads(text)
    except ValueError as error:
        raise MinivllmError(f"which is not one JSON object: {error}") from None
    prompts, outputs = result.get("input_lens"), result.get("output_lens")
    if not isinstance(prompts, list) or not isinstance(outputs, list):
        raise MinivllmError(
            "which has no input_lens and output_lens; `vllm bench serve --save-result --save-detailed` writes them"
        )
    counts = f"{len(prompts)} input_lens and {len(outputs)} output_lens"
    require(len(prompts) == len(outputs), f"which has {counts}; each request needs both")
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        yield f"request {index + 1}", prompt, output
