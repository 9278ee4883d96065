"""Test the check of line ranges: one that does not begin and end where the text says is found, and
so is a name that is not in the lines, or that nothing explains.
"""

import ast

import pytest
import vllm_lines as tool

VERSION = "0.33.0"
FILE = "vllm/v1/pool.py"
BLOB = f"https://github.com/vllm-project/vllm/blob/v{VERSION}/{FILE}"
SOURCE = '''"""A pool."""


class Pool:
    def take(self, n):
        taken = []
        while self.free and not self.closed:
            block = self.free.pop()
            if self.watcher is not None:
                self.watcher.notify(block)
            taken.append(block)
        return taken
'''


def row(lines: str, label: str, what: str = "Take", ignore: str = "") -> str:
    first, last = lines.split("-")
    return f"| [{first}–{last}]({BLOB}#L{first}-L{last}) {label} | {what} | 02 | ours `strange` | {ignore} |"


def ranges(text: str, page: str = "lessons/reading/01_pool.md"):
    return list(tool.line_ranges(page, text, VERSION))


def problems(text: str, record_text: str | None = None) -> list[str]:
    """Return the problems of a page, with a record made of it or of another one."""
    record = tool.record_of(ranges(record_text or text), {FILE: SOURCE})
    return tool.problems(ranges(text), record, VERSION)


@pytest.mark.parametrize(
    ("lines", "label"),
    [
        ("4-12", "`class Pool`"),
        ("8-11", "`block` to `taken.append`"),
        ("10-10", "`watcher.notify`"),
        ("7-12", "`while free` to `return taken`"),
    ],
)
def test_a_range_is_a_statement_or_several_of_one_block(lines: str, label: str):
    assert problems(row(lines, label)) == []


@pytest.mark.parametrize(
    ("lines", "label", "there"),
    [
        ("7-11", "`while closed`", "`while free`"),
        ("7-12", "`while free`", "`while free` to `return taken`"),
        ("7-10", "`while free`", "not whole statements"),
        ("7-9", "`while free`", "not whole statements"),
        ("9-12", "`if watcher` to `return taken`", "not whole statements"),
        ("1-99", "`class Pool`", "not in the list"),
    ],
)
def test_a_range_that_is_something_else_is_found(lines: str, label: str, there: str):
    (problem,) = problems(f"text\n\n{row(lines, label)}")
    assert problem.startswith(f"lessons/reading/01_pool.md:3: lines {lines} of {FILE}")
    assert there in problem


def test_a_range_that_is_new_or_has_moved_is_not_in_the_record():
    assert "not in the list" in problems(row("6-11", "`taken` to `while free`"), row("7-11", "`while free`"))[0]


def test_names_of_a_row_stand_in_its_lines():
    (problem,) = problems(row("7-11", "`while free`", "Take from `free`, then `give`"))
    assert "give not in lines 7-11" in problem, "the names of our own column are ours"


def test_a_name_that_nothing_explains_is_found():
    page = "lessons/reading/01_pool.md"
    text = row("7-11", "`while free`", ignore="`watcher`: tests")
    record = tool.record_of(ranges(text), {FILE: SOURCE})
    texts = {page: text, "lessons/01_a.md": "A pool is `closed` when it is over."}
    (problem,) = tool.unexplained_names(ranges(text), record, texts)
    assert problem == f"{page}:1: lines 7-11 also have notify: say what each is"
    texts["vllm/minivllm/pool.py"] = "def notify(): ...\n"
    linked = text.replace("ours", "[ours](../../vllm/minivllm/pool.py)")
    assert tool.unexplained_names(ranges(linked), record, texts | {page: linked}) == []


def test_links_of_the_lessons_only_need_lines_that_are_there():
    text = f"See [these lines]({BLOB}#L6-L9) `anything`, [that one]({BLOB}#L3), and [too far]({BLOB}#L7-L70)."
    of_a_lesson = ranges(text, "lessons/04_a.md")
    record = tool.record_of(of_a_lesson, {FILE: SOURCE})
    (problem,) = tool.problems(of_a_lesson, record, VERSION)
    assert problem.startswith(f"lessons/04_a.md:1: lines 7-70 of {FILE}")
    assert ranges(text.replace(VERSION, "0.9.0")) == []


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("async def f(): ...", "async def f"), ("for a, b in c: ...", "for a"), ("async for a in c: ...", "for a"),
        ("with open(x) as y: ...", "with open"), ("if not self.a.b and c: ...", "if a.b"),
        ("if (one := two()): ...", "if one"), ("while True: ...", "while"), ("a.b, c = 1, 2", "a.b"),
        ("self.a: int = 1", "a"), ("a &= b", "a"), ("await self.a.b(c)", "a.b"), ("kernel[(1,)](x)", "kernel"),
        ("assert len(a) == 1", "assert len"), ("raise ValueError(a)", "raise ValueError"),
        ("try: ...\nfinally: ...", "try"), ("return None", "return"), ("return self.f(x)", "return f"),
    ],
)  # fmt: skip
def test_the_name_of_a_statement(code: str, label: str):
    body = ast.parse(f"async def f():\n    {code.replace(chr(10), chr(10) + '    ')}").body[0].body
    assert tool.label(body[0]) == label


def test_the_name_of_a_handler():
    handler = ast.parse("try: ...\nexcept (a.B, C): ...").body[0].handlers[0]
    assert tool.label(handler) == "except a.B"


CHANGED = SOURCE.replace("self.free.pop()", "self.next()").replace('"""A pool."""', '"""A pool."""\n\nimport os')
RENAMED = CHANGED.replace("taken = []", "taken = list()")


@pytest.mark.parametrize(
    ("lines", "label", "source", "fate"),
    [
        ("7-11", "`while free`", SOURCE, ("same", FILE, "7-11")),
        ("7-11", "`while free`", "import os\n" + SOURCE, ("moved", FILE, "8-12")),
        ("7-11", "`while free`", SOURCE.replace("  ", " "), ("same", FILE, "7-11")),
        ("7-11", "`while free`", CHANGED, ("changed", FILE, "9-13")),
        ("6-11", "`taken` to `while free`", RENAMED, ("changed", FILE, "8-13")),  # by its statements
        ("8-9", "not whole", CHANGED.replace("block =", "one ="), ("changed", FILE, "")),
        ("7-11", "`while free`", SOURCE.replace("while self.free", "for _ in self.free"), ("gone", "", "")),
        ("7-11", "`while free`", SOURCE.replace("def take", "def get").replace("pop", "popleft"), ("gone", "", "")),
        ("7-11", "`while free`", None, ("gone", "", "")),
    ],
)
def test_what_became_of_a_range_in_another_release(lines: str, label: str, source: str | None, fate: tuple):
    record = tool.record_of(ranges(row(lines, label)), {FILE: SOURCE})
    became = tool.fate(FILE, lines, record[FILE][lines], {} if source is None else {FILE: source})
    assert (became.what, became.path, became.lines) == fate
