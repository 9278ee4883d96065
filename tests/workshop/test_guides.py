"""Test the instructor's guides: their form, their minutes, and that what they quote is what the
checks say.
"""

import ast
import functools
import re
from collections.abc import Iterator

import moves
import pytest
import slides
from repository import ROOT

from minivllm_lab.exercise import checks_paths

GUIDES = ROOT / "workshop" / "guides"
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("[0-9][0-9]_*.md"))
PARTS = (
    "Plan",
    "What learners get wrong",
    "Demo",
    "Poll",
    "Hints",
    "If a third of the room is stuck",
    "Questions that come up",
)
LEAST = 8  # letters of a message that say something
IF_TIME = "*if time*"
BET, POLL, DEMO = 2, 2, 2
"""Minutes at least, as `workshop/README.md` says; any other slide takes one."""
CODE = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
by_lesson = pytest.mark.parametrize("stem", LESSONS)


def guide(stem: str) -> str:
    return (GUIDES / f"{stem}.md").read_text()


def section(stem: str, heading: str) -> str:
    return guide(stem).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables of a text, without headers and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    body = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not re.match(r"\| *:?-", after)]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body if not re.match(r"\| *:?-", line)
    ]


@by_lesson
def test_a_guide_has_all_parts_in_order(stem):
    headings = re.findall(r"^## (.*)$", guide(stem), re.MULTILINE)
    assert headings == [*PARTS]
    goal = re.search(r"^\*\*Goal\.\*\* ([^\n]+(?:\n[^\n]+)*)", guide(stem), re.MULTILINE)
    assert goal
    assert re.fullmatch(r"[^.!?]*(?:\.\w[^.!?]*)*[.]", goal[1].replace("\n", " ")), "the goal is one sentence"
    assert f"](../workshop/guides/{stem}.md)" in (ROOT / "lessons" / f"{stem}.md").read_text()


@by_lesson
def test_the_plan_adds_up_to_the_lessons_header(stem):
    header = re.search(
        r"\*\*Time:\*\* (\d+) minutes of talk, (\d+) of exercise", (ROOT / "lessons" / f"{stem}.md").read_text()
    )
    assert header
    sums, total = [], 0
    for minutes, part, *_ in rows(section(stem, "Plan")):
        if minutes == IF_TIME:
            continue
        if minutes.startswith("**"):
            assert int(minutes.strip("*")) == total, f"the minutes of the {part.strip('*')} add up to {total}"
            sums.append((part.strip("*"), total))
            total = 0
        else:
            total += int(minutes)
    assert sums == [("talk", int(header[1])), ("exercise", int(header[2]))]


def numbered(cell: str) -> list[int]:
    """Return the slides of a cell: `4`, or `1–3`."""
    first, _, last = cell.partition("–")
    return [*range(int(first), int(last or first) + 1)] if cell else []


def asked(cell: str) -> list[tuple[str, int, int | None]]:
    """Return kind, number and slide of each entry of a cell: `poll 1 on 2, poll 3, demo 1 on 14`."""
    entries = [re.fullmatch(r"(poll|demo) (\d)(?: on (\d+))?", entry) for entry in cell.split(", ") if entry]
    assert all(entries), cell
    return [(entry[1], int(entry[2]), int(entry[3]) if entry[3] else None) for entry in entries if entry]


def minutes_of(slide: slides.Slide, known: dict[str, slides.Time]) -> int:
    """Return the minutes that a slide takes at least: a bet is answered first, and a demo is waited for."""
    if slide.title.startswith("Demo"):
        return 1 + sum(-(-known[command].seconds[1] // 60) for command in slide.commands)
    return BET if slide.title.startswith("Bet") else 1


@by_lesson
def test_a_part_of_the_plan_has_the_minutes_of_its_slides_polls_and_demos(stem):
    shown, known = slides.Deck(ROOT / slides.DECKS / f"{stem}.md").slides, slides.demos(ROOT)
    for minutes, part, numbers, entries, _ in rows(section(stem, "Plan")):
        if minutes == IF_TIME or minutes.startswith("**"):
            continue
        needed = sum(minutes_of(shown[number - 1], known) for number in numbered(numbers))
        for kind, number, slide in asked(entries):
            if slide is None:
                needed += POLL if kind == "poll" else DEMO
            else:
                assert slide in numbered(numbers), f"{part}: {kind} {number} is on slide {slide}"
                assert shown[slide - 1].title.startswith("Bet" if kind == "poll" else "Demo"), f"{part}: {slide}"
        assert int(minutes) >= needed, f"{part}: {numbers} {entries} take {needed} minutes"


@by_lesson
def test_every_slide_poll_and_demo_stands_in_the_plan_once(stem):
    plan = rows(section(stem, "Plan"))
    count = len(slides.Deck(ROOT / slides.DECKS / f"{stem}.md").slides)
    assert sorted(number for row in plan for number in numbered(row[2])) == [*range(1, count + 1)]
    held = [(kind, number) for row in plan for kind, number, _ in asked(row[3])]
    polled = [("poll", number) for number, _ in enumerate(polls(stem), start=1)]
    assert sorted(held) == [*(("demo", number) for number, _ in enumerate(demos(stem), start=1)), *polled]
    taught = [number for row in plan if row[0] != IF_TIME for number in numbered(row[2])]
    assert taught == sorted(taught), "the deck has another order"


@functools.cache
def patterns(stem: str) -> list[re.Pattern[str]]:
    """Return a pattern for each message in an exercise's checks, and in the lab's parts that they use: its
    literal pieces are groups, and what it inserts may be anything.
    """
    lab = (ROOT / "vllm" / "minivllm_lab" / f"{name}.py" for name in ("kernel_trace", "virtual_loop"))
    sources = [*checks_paths(stem[:2]), *lab]
    found: list[list[str]] = []
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.JoinedStr):
            found.append([str(part.value) for part in node.values if isinstance(part, ast.Constant)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append([node.value])
    long_enough = [pieces for pieces in found if len("".join(pieces).strip()) >= LEAST]
    return [re.compile(".*?".join(f"({re.escape(piece)})" for piece in pieces)) for pieces in long_enough]


def share_of_source(message: str, stem: str) -> float:
    """Return the share of a message's letters that are literal in a message of the checks' source; numbers and
    names that it inserts are not.
    """
    literal: set[int] = set()
    for pattern in patterns(stem):
        if match := pattern.search(message):
            literal.update(at for group in range(1, pattern.groups + 1) for at in range(*match.span(group)))
    letters = [at for at, sign in enumerate(message) if sign.isalpha()]
    return sum(at in literal for at in letters) / len(letters)


def quoted(stem: str) -> Iterator[str]:
    for message, *_ in rows(section(stem, "What learners get wrong")):
        match = CODE.fullmatch(message)
        assert match, f"{message} is not quoted"
        yield match[2].replace("\\|", "|")


@by_lesson
def test_a_quoted_message_is_one_of_the_checks(stem):
    messages = [*quoted(stem)]
    assert len(messages) >= 8
    for message in messages:
        assert share_of_source(message, stem) > 0.6, message


@by_lesson
def test_a_mistake_has_a_question_and_no_row_is_empty(stem):
    for message, wrote, ask in rows(section(stem, "What learners get wrong")):
        assert wrote, message
        assert ask.startswith('"'), f"ask a question in quotation marks, for {message}"


def demos(stem: str) -> list[str]:
    return re.split(r"^### ", section(stem, "Demo"), flags=re.MULTILINE)[1:]


@by_lesson
def test_break_it_says_what_to_do_and_what_the_room_sees(stem):
    """Compare the words that it quotes with the verdict of the widget that it opens."""
    (demo,) = (text for text in demos(stem) if re.match(r"\d\. Break it: ", text))
    shown = re.search(r"^- \*\*You see:\*\* (.*?)(?=^- |\Z)", demo, re.DOTALL | re.MULTILINE)
    assert shown, "what does the room see?"
    states = re.findall(r"\.md#(\w+\?[^)\s]+)\)", demo)
    quotes = [quote for _, quote in CODE.findall(shown[1])]
    for state, quote in zip(states, quotes, strict=True) if states else ():
        spec, values = moves.start_of(state)
        verdict = spec.verdict(spec.complete(**values)).words
        assert quote in verdict, f"{state}: {verdict}"


@by_lesson
def test_the_seconds_of_a_demo_are_the_measured_ones(stem):
    known = slides.demos(ROOT)
    for demo in demos(stem):
        command = re.search(r"```bash\n(.*)", demo)
        if command and command[1] in known:
            low, high = known[command[1]].seconds
            assert f"**Takes:** {low} to {high} s" in demo, f"{command[1]}: {low} to {high} s"


@by_lesson
def test_a_demo_says_what_to_run_what_to_say_how_long_it_takes_and_what_to_do_if_it_fails(stem):
    assert len(demos(stem)) >= 2
    makefile = (ROOT / "Makefile").read_text()
    for demo in demos(stem):
        title = demo.splitlines()[0]
        for mark in ("- **Say while it runs:**", "- **Takes:**", "- **If it fails:**"):
            assert mark in demo, f"{title}: {mark}"
        taken = re.search(r"\*\*Takes:\*\* (.*?)(?=\n- |\Z)", demo, re.DOTALL)
        assert taken
        assert re.search(r"\d+ to \d+ s|a second", taken[1]), f"{title}: seconds, with a range"
        commands = [line for block in re.findall(r"```bash\n(.*?)```", demo, re.DOTALL) for line in block.splitlines()]
        assert commands, title
        for command in commands:
            for script in re.findall(r"\b(?:vllm|lessons|tools)/[\w/]+\.py", command):
                assert (ROOT / script).is_file(), command
            for module in re.findall(r"-m (minivllm_lab)\.(\w+)", command):
                place = ROOT / "vllm" / module[0] / module[1]
                assert place.with_suffix(".py").is_file() or place.is_dir(), command
            for target in re.findall(r"^make (\w+)", command):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), command


def polls(stem: str) -> Iterator[tuple[str, list[list[str]]]]:
    for poll in re.split(r"^### ", section(stem, "Poll"), flags=re.MULTILINE)[1:]:
        yield poll.splitlines()[0], rows(poll)


@by_lesson
def test_a_poll_has_one_right_answer_and_a_reason_for_each_other(stem):
    asked = [*polls(stem)]
    assert len(asked) >= 4
    for number, (title, answers) in enumerate(asked, start=1):
        assert title.startswith(f"Poll {number} · "), title
        assert [letter.strip("*") for letter, *_ in answers] == [*"ABCD"], title
        right = [answer for letter, answer, reason in answers if letter.startswith("**")]
        assert len(right) == 1, f"{title}: one answer is right"
        for letter, answer, reason in answers:
            assert letter.startswith("**") == answer.startswith("**") == reason.startswith("Right"), (
                f"{title}: {letter}"
            )
            assert letter.startswith("**") or len(reason.split()) >= 3, f"{title}: say what {letter} reveals"
    right_letters = {letter for _, answers in asked for letter, *_ in answers if letter.startswith("**")}
    assert len(right_letters) > 1, "the right answer is always the same letter"


@by_lesson
def test_hints_come_at_minutes_10_20_and_30_and_give_no_code(stem):
    hints = rows(section(stem, "Hints"))
    assert [minute for minute, *_ in hints] == ["10", "20", "30"]
    assert "```" not in section(stem, "Hints")
    script = (ROOT / "vllm" / f"{stem}.py").read_text()
    solution = {line.strip() for line in script.splitlines() if len(line.strip()) > 12}
    for _, *cells in hints:
        for cell in cells:
            assert cell.startswith('"'), f"{stem}: {cell} is not a sentence that you can say"
            for _, code in CODE.findall(cell):
                assert code not in solution, f"{stem}: a hint never shows code: {code}"


@by_lesson
def test_the_last_two_parts_are_of_use(stem):
    assert len(re.findall(r"^- \*\*", section(stem, "If a third of the room is stuck"), re.MULTILINE)) >= 3
    questions = re.findall(r"^\*\*(.*?)\*\* (?=\S)", section(stem, "Questions that come up"), re.MULTILINE)
    assert len(questions) >= 5
    assert all(question.endswith("?") for question in questions), questions
