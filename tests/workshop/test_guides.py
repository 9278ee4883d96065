"""Test the instructor's guides: their form, their minutes, and that what they quote is what the
checks say.
"""

import ast
import functools
import re

import moves
import pytest
import slides
from repository import LESSONS, ROOT, lesson, minutes
from workshop.test_slides import assert_commands_exist

from minivllm_lab.exercise import checks_paths

PARTS = (
    "Plan", "What learners get wrong", "Demo", "Poll", "Hints", "If a third of the room is stuck",
    "Questions that come up",
)  # fmt: skip
LEAST = 8  # letters of a message that say something
IF_TIME = "*if time*"
BET, POLL, DEMO = 2, 2, 2
"""Minutes at least, as `workshop/README.md` says; any other slide takes one."""
CODE = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
by_lesson = pytest.mark.parametrize("stem", LESSONS)


def guide(stem: str) -> str:
    return (ROOT / "workshop" / "guides" / f"{stem}.md").read_text()


def section(stem: str, heading: str) -> str:
    return guide(stem).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def entries(stem: str, heading: str) -> list[str]:
    """Return the parts of a section below each of its own headings."""
    return re.split(r"^### ", section(stem, heading), flags=re.MULTILINE)[1:]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables of a text, without headers and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    is_rule = [bool(re.match(r"\| *:?-", line)) for line in [*lines, ""]]
    body = [line for at, line in enumerate(lines) if not is_rule[at] and not is_rule[at + 1]]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


@by_lesson
def test_a_guide_has_all_parts_in_order(stem):
    headings = re.findall(r"^## (.*)$", guide(stem), re.MULTILINE)
    assert headings == [*PARTS]
    goal = re.search(r"^\*\*Goal\.\*\* ([^\n]+(?:\n[^\n]+)*)", guide(stem), re.MULTILINE)
    assert goal
    assert re.fullmatch(r"[^.!?]*(?:\.\w[^.!?]*)*[.]", goal[1].replace("\n", " ")), "the goal is one sentence"
    assert f"](../workshop/guides/{stem}.md)" in lesson(stem)


@by_lesson
def test_the_plan_adds_up_to_the_lessons_header(stem):
    sums, total = [], 0
    for lasts, part, *_ in rows(section(stem, "Plan")):
        if lasts.startswith("**"):
            assert int(lasts.strip("*")) == total, f"the minutes of the {part.strip('*')} add up to {total}"
            sums.append(total)
            total = 0
        elif lasts != IF_TIME:
            total += int(lasts)
    assert sums == [*minutes(stem)]


def numbered(cell: str) -> list[int]:
    """Return the slides of a cell: `4`, or `1–3`."""
    first, _, last = cell.partition("–")
    return [*range(int(first), int(last or first) + 1)] if cell else []


def asked(cell: str) -> list[tuple[str, int, int | None]]:
    """Return kind, number and slide of each entry of a cell: `poll 1 on 2, poll 3, demo 1 on 14`."""
    found = [re.fullmatch(r"(poll|demo) (\d)(?: on (\d+))?", entry) for entry in cell.split(", ") if entry]
    assert all(found), cell
    return [(entry[1], int(entry[2]), int(entry[3]) if entry[3] else None) for entry in found if entry]


def deck(stem: str) -> list[slides.Slide]:
    return slides.Deck(ROOT / slides.DECKS / f"{stem}.md").slides


def minutes_of(slide: slides.Slide) -> int:
    """Return the minutes that a slide takes at least: a bet is answered first, and a demo is waited for."""
    if slide.title.startswith("Demo"):
        return 1 + sum(-(-slides.demos(ROOT)[command].seconds[1] // 60) for command in slide.commands)
    return BET if slide.title.startswith("Bet") else 1


@by_lesson
def test_a_part_of_the_plan_has_the_minutes_of_its_slides_polls_and_demos(stem):
    shown = deck(stem)
    for lasts, part, numbers, entered, _ in rows(section(stem, "Plan")):
        if lasts == IF_TIME or lasts.startswith("**"):
            continue
        needed = sum(minutes_of(shown[number - 1]) for number in numbered(numbers))
        for kind, number, slide in asked(entered):
            if slide is None:
                needed += POLL if kind == "poll" else DEMO
            else:
                assert slide in numbered(numbers), f"{part}: {kind} {number} is on slide {slide}"
                assert shown[slide - 1].title.startswith("Bet" if kind == "poll" else "Demo"), f"{part}: {slide}"
        assert int(lasts) >= needed, f"{part}: {numbers} {entered} take {needed} minutes"


@by_lesson
def test_every_slide_poll_and_demo_stands_in_the_plan_once(stem):
    plan = rows(section(stem, "Plan"))
    assert sorted(number for row in plan for number in numbered(row[2])) == [*range(1, len(deck(stem)) + 1)]
    held = sorted((kind.title(), number) for row in plan for kind, number, _ in asked(row[3]))
    counts = [(kind, len(entries(stem, kind))) for kind in ("Demo", "Poll")]
    assert held == [(kind, number) for kind, count in counts for number in range(1, count + 1)]
    taught = [number for row in plan if row[0] != IF_TIME for number in numbered(row[2])]
    assert taught == sorted(taught), "the deck has another order"


@functools.cache
def patterns(stem: str) -> list[re.Pattern[str]]:
    """Return a pattern for each message in an exercise's checks, and in the lab's parts that they use: its
    literal pieces are groups, and what it inserts may be anything.
    """
    lab = (ROOT / "vllm" / "minivllm_lab" / "checks" / f"{name}.py" for name in ("kernel_trace", "virtual_loop"))
    found: list[list[str]] = []
    for node in (node for path in (*checks_paths(stem[:2]), *lab) for node in ast.walk(ast.parse(path.read_text()))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found.append([part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)])
    long_enough = [pieces for pieces in found if len("".join(pieces).strip()) >= LEAST]
    return [re.compile(".*?".join(f"({re.escape(piece)})" for piece in pieces)) for pieces in long_enough]


def share_of_source(message: str, stem: str) -> float:
    """Return the share of a message's letters that are literal in a message of the checks' source; numbers and
    names that it inserts are not.
    """
    literal: set[int] = set()
    for match in filter(None, (pattern.search(message) for pattern in patterns(stem))):
        literal.update(at for group in range(1, match.re.groups + 1) for at in range(*match.span(group)))
    letters = [at for at, sign in enumerate(message) if sign.isalpha()]
    return sum(at in literal for at in letters) / len(letters)


@by_lesson
def test_a_quoted_message_is_one_of_the_checks_and_has_a_question(stem):
    mistakes = rows(section(stem, "What learners get wrong"))
    assert len(mistakes) >= 8
    for message, wrote, ask in mistakes:
        quoted = CODE.fullmatch(message)
        assert quoted, f"{message} is not quoted"
        assert share_of_source(quoted[2].replace("\\|", "|"), stem) > 0.6, message
        assert wrote, message
        assert ask.startswith('"'), f"ask a question in quotation marks, for {message}"


@by_lesson
def test_break_it_says_what_to_do_and_what_the_room_sees(stem):
    """Compare the words that it quotes with the verdict of the widget that it opens."""
    (demo,) = (text for text in entries(stem, "Demo") if re.match(r"\d\. Break it: ", text))
    shown = re.search(r"^- \*\*You see:\*\* (.*?)(?=^- |\Z)", demo, re.DOTALL | re.MULTILINE)
    assert shown, "what does the room see?"
    states = re.findall(r"\.md#(\w+\?[^)\s]+)\)", demo)
    quotes = [quote for _, quote in CODE.findall(shown[1])]
    for state, quote in zip(states, quotes, strict=True) if states else ():
        spec, values = moves.start_of(state)
        verdict = spec.verdict(spec.complete(**values)).words
        assert quote in verdict, f"{state}: {verdict}"


@by_lesson
def test_a_demo_says_what_to_run_what_to_say_how_long_it_takes_and_what_to_do_if_it_fails(stem):
    known = slides.demos(ROOT)
    assert len(entries(stem, "Demo")) >= 2
    for demo in entries(stem, "Demo"):
        title = demo.splitlines()[0]
        for mark in ("- **Say while it runs:**", "- **Takes:**", "- **If it fails:**"):
            assert mark in demo, f"{title}: {mark}"
        takes = r"\*\*Takes:\*\* (?:(?!\n- ).)*(?:\d+ to \d+ s|a second)"
        assert re.search(takes, demo, re.DOTALL), f"{title}: a range"
        commands = [line for block in re.findall(r"```bash\n(.*?)```", demo, re.DOTALL) for line in block.splitlines()]
        assert commands, title
        assert_commands_exist("\n".join(commands), stem[:2])
        if commands[0] in known:
            low, high = known[commands[0]].seconds
            assert f"**Takes:** {low} to {high} s" in demo, f"{commands[0]}: {low} to {high} s"


@by_lesson
def test_a_poll_has_one_right_answer_and_a_reason_for_each_other(stem):
    polls, right_letters = entries(stem, "Poll"), set()
    assert len(polls) >= 4
    for number, poll in enumerate(polls, start=1):
        title, answers = poll.splitlines()[0], rows(poll)
        assert title.startswith(f"Poll {number} · "), title
        assert [letter.strip("*") for letter, *_ in answers] == [*"ABCD"], title
        (right,) = (letter for letter, *_ in answers if letter.startswith("**"))
        right_letters.add(right)
        for letter, answer, reason in answers:
            marked = {letter == right, answer.startswith("**"), reason.startswith("Right")}
            assert len(marked) == 1, f"{title}: {letter}"
            assert letter == right or len(reason.split()) >= 3, f"{title}: say what {letter} reveals"
    assert len(right_letters) > 1, "the right answer is always the same letter"


@by_lesson
def test_hints_come_at_minutes_10_20_and_30_and_give_no_code(stem):
    hints = rows(section(stem, "Hints"))
    assert [minute for minute, *_ in hints] == ["10", "20", "30"]
    assert "```" not in section(stem, "Hints")
    script = (ROOT / "vllm" / f"{stem}.py").read_text()
    solution = {line.strip() for line in script.splitlines() if len(line.strip()) > 12}
    for cell in (cell for _, *cells in hints for cell in cells):
        assert cell.startswith('"'), f"{stem}: {cell} is not a sentence that you can say"
        assert solution.isdisjoint(code for _, code in CODE.findall(cell)), f"{stem}: a hint never shows code: {cell}"


@by_lesson
def test_the_last_two_parts_are_of_use(stem):
    assert len(re.findall(r"^- \*\*", section(stem, "If a third of the room is stuck"), re.MULTILINE)) >= 3
    questions = re.findall(r"^\*\*(.*?)\*\* (?=\S)", section(stem, "Questions that come up"), re.MULTILINE)
    assert len(questions) >= 5
    assert all(question.endswith("?") for question in questions), questions
