"""Lesson 07's opening: drafts looked up in the followed request's own text, the pass that verifies
them, and the tokens kept.

The request runs on for 27 tokens; the stills show two of its steps: one whose drafts are all
rejected and one whose drafts are all accepted. Lookups in this text are right or wrong as a whole.
So a third step comes from the same request with a draft model, where two of three drafts are
accepted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, CacheConfig
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams
from minivllm.worker.model_runner import ExecuteModelState
from minivllm_lab.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, text, tint
from minivllm_lab.followed import BLOCK_SIZE, NAME, PROMPT, Token, without_info
from minivllm_lab.frames import Frames
from minivllm_lab.inside import runner_of
from minivllm_lab.palette import BLUE, GREEN, ORANGE, VERMILLION
from minivllm_lab.recording import bare_engine

WIDTH, HEIGHT, LEFT = 860, 366, 20
MAX_TOKENS, NUM_DRAFTS = 27, 3
DASH = "4 3"
KNOWN, DRAFT, OWN, GOOD = tint(BLUE, 0.3), tint(ORANGE, 0.55), tint(BLUE, 0.75), tint(GREEN, 0.5)
TEXT_Y, FED_Y, MODEL_Y, SAYS_Y, VERDICT_Y, SLOTS_Y = 56, 112, 152, 200, 236, 306
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT_MODEL = {"method": "draft_model", "model": str(EMBEDDED_DRAFT)}
NAMES, COLUMN, WIDE, CHIP = 130, 150, 100, 26
"""Width of the names at the left, of a column of the pass, of a chip in it, and height of a
chip.
"""


@dataclass(frozen=True)
class Verified:
    """A step of the request: the tokens before it, the drafts, the model's predictions, and the
    tokens that are kept.

    `says` holds the model's most likely token after the last known token and after each draft;
    `kept` holds the step's tokens.
    """

    known: tuple[Token, ...]
    drafts: tuple[Token, ...]
    says: tuple[Token, ...]
    kept: tuple[Token, ...]

    @property
    def num_accepted(self) -> int:
        """Number of accepted drafts."""
        return len(self.kept) - 1


def frames() -> Frames:
    """Draw the lookup, the pass and the verdict of both steps, a draft model's verdict, and the
    tokens of each step.
    """
    steps, others = recorded(), recorded("draft_model")
    wrong = next(i for i, step in enumerate(steps) if len(step.drafts) == NUM_DRAFTS and step.known[-1].text == "def")
    right = next(i for i, step in enumerate(steps) if step.num_accepted == NUM_DRAFTS)
    partly = max(i for i, step in enumerate(others) if step.num_accepted == NUM_DRAFTS - 1)
    bad, good, partial = steps[wrong], steps[right], others[partly]
    drafts, last = _listed(bad.drafts), bad.known[-1].shown
    stills = [
        (
            _lookup(bad, wrong),
            f"{last} has just been sampled. It also occurs at the beginning: the three tokens that followed it there "
            f"are the drafts: {drafts}",
        ),
        (
            _pass(bad, wrong),
            f"{last} has to be computed anyway. The drafts ride along: one pass over four tokens reads the weights "
            "once, and predicts after each of them what comes next.",
        ),
        (
            _verdict(bad, wrong),
            f"After {last} the model predicts {bad.says[0].shown}, not {bad.drafts[0].shown}: rejected. The later "
            "drafts are what the model predicts, but after a text that is now wrong. The model's own token is kept, as "
            "without drafts.",
        ),
        (
            _lookup(good, right),
            f"Five steps later, {good.known[-1].shown}: what followed it the first time was {_listed(good.drafts)}.",
        ),
        (
            _verdict(good, right),
            "The model predicts the same at all three positions, so its fourth row counts, too, as a bonus token: four "
            "tokens from one pass.",
        ),
        (
            _verdict(partial, partly, "with a draft model"),
            "The same request again, with a draft model that guesses. Two of its drafts are accepted. The third, "
            f"“{partial.drafts[2].shown}”, is replaced by the model's own “{partial.kept[-1].shown}”; the next step "
            "overwrites its keys and values.",
        ),
        (
            _by_step(steps),
            f"By lookup, {MAX_TOKENS} tokens in {len(steps)} passes; with the draft model in {len(others)}, and small "
            "ones of its own. Rejected drafts cost a little work; the tokens are the same as without drafts.",
        ),
    ]
    assert right - wrong == 5, "a caption counts the steps"
    assert bad.says[1:-1] == bad.drafts[1:], "a caption says so"
    assert len(partial.kept) == 3, "a caption counts the drafts"
    return Frames(*zip(*stills, strict=True))


@cache
def recorded(method: str = "ngram") -> list[Verified]:
    """Record every step of the followed request, greedy, with up to three drafts: by suffixes of
    one to three tokens (ngram), or by the embedded draft model (draft_model).
    """
    tokenizer = load_tokenizer(EMBEDDED_MODEL)

    def tokens(ids: list[int]) -> tuple[Token, ...]:
        return tuple(Token(token_id, tokenizer.decode([token_id])) for token_id in ids)

    drafting = {**(LOOKUP if method == "ngram" else DRAFT_MODEL), "num_speculative_tokens": NUM_DRAFTS}
    blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=16, enable_prefix_caching=True)
    settings = {"max_model_len": 48, "max_num_seqs": 1, "dtype": "float32", "speculative_config": drafting}
    with without_info():
        core = bare_engine(EMBEDDED_MODEL, torch.device("cpu"), blocks, **settings)
    runner, ids, verified = runner_of(core), tokenizer.encode(PROMPT).ids, []
    sample = type(runner).sample

    def noted(step: ExecuteModelState, *others: Any) -> Any:
        says = runner.model.compute_logits(step.hidden).argmax(-1).tolist()
        output: Any = sample(runner, step, *others)
        kept = output.sampled_token_ids[NAME]
        verified.append(Verified(tokens(ids), tokens(step.inputs.drafts.get(NAME, [])), tokens(says), tokens(kept)))
        ids.extend(kept)
        return output

    # Note the model's predictions at the drafts' positions.
    runner.sample = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    core.add_request(EngineCoreRequest(NAME, list(ids), params, (), time.monotonic()))
    while core.has_unfinished_requests():
        core.step()
    return verified


# ---- the stills ----------------------------------------------------------------------------------


def _lookup(step: Verified, index: int) -> str:
    """Draw the text, the place where its last token first occurs, and the drafts that followed
    there.
    """
    shapes, places = _text(step)
    start = _first_place(step)
    last, first = places[len(step.known) - 1], places[start]
    below = TEXT_Y + CHIP + 8
    shapes += [_frame(*last, ORANGE), _frame(*first, ORANGE)]
    shapes += [_frame(*places[start + 1 + offset], ORANGE, DASH) for offset in range(len(step.drafts))]
    shapes += [
        line((_middle(last), below), (_middle(last), below + 14), ORANGE),
        line((_middle(last), below + 14), (_middle(first), below + 14), ORANGE),
        arrow((_middle(first), below + 14), (_middle(first), below), ORANGE),
        text(_middle(first) + 12, below + 30, "its first place", size=12, colour=QUIET),
    ]
    shapes += _fed(step, 190, "the next pass")
    return _still(f"Step {index + 1}: a guess", *shapes)


def _pass(step: Verified, index: int) -> str:
    """Draw one pass over the last token and the drafts, with the model's prediction after each."""
    shapes, _ = _text(step)
    return _still(f"Step {index + 1}: one pass", *shapes, *_fed(step, FED_Y), *_says(step))


def _verdict(step: Verified, index: int, guesser: str = "") -> str:
    """Draw which drafts the model predicts and what becomes of their slots; `guesser` is the source
    of the drafts if it is not the lookup.
    """
    shapes, _ = _text(step)
    shapes += [*_fed(step, FED_Y), *_says(step, len(step.kept)), _name(VERDICT_Y, "the draft there")]
    for place in range(len(step.says)):
        draft = step.drafts[place].shown if place < len(step.drafts) else ""
        words = "accepted" if place < step.num_accepted else "rejected" if place == step.num_accepted else "too late"
        if place == len(step.drafts):
            words, draft = ("a bonus" if place == step.num_accepted else ""), "no draft"
        if words:
            shapes.append(text(_centre(place), VERDICT_Y + 18, f"{words}: {draft}", anchor="middle", bold=True))
    shapes += _slots(step)
    where = f"Step {index + 1}{', ' * bool(guesser)}{guesser}"
    return _still(f"{where}: {len(step.kept)} token{'s' * (len(step.kept) > 1)}", *shapes)


def _by_step(steps: list[Verified]) -> str:
    """Draw the tokens of every step as a stack, and below them one step per token without drafts."""
    shapes, wide, tall, floor = [], 34, 26, 190
    total = sum(len(step.kept) for step in steps)
    for index, step in enumerate(steps):
        x = LEFT + 100 + index * wide
        for level, token in enumerate(step.kept):
            fill = GOOD if level < step.num_accepted else OWN
            shapes.append(rect(x, floor - (level + 1) * tall, wide - 3, tall - 3, fill, radius=2))
            shapes.append(_fitting(x, floor - (level + 1) * tall, wide - 3, token.shown))
        for level in range(len(step.kept), len(step.drafts) + 1):
            shapes.append(
                rect(x, floor - (level + 1) * tall, wide - 3, tall - 3, stroke=VERMILLION, dash=DASH, radius=2)
            )
        shapes.append(text(x + (wide - 3) / 2, floor + 16, str(index + 1), size=11, anchor="middle", colour=QUIET))
    end = LEFT + 100 + len(steps) * wide
    shapes += [text(LEFT, floor - 8, "with drafts"), text(end + 12, floor - 8, f"{len(steps)} passes", bold=True)]
    plain, narrow = 248, (end - LEFT - 100) / len(steps) * 0.9
    narrow = min(narrow, (WIDTH - LEFT - 100 - 110) / total)
    for index in range(total):
        shapes.append(rect(LEFT + 100 + index * narrow, plain, narrow - 3, tall - 3, OWN, radius=2))
    shapes += [
        text(LEFT, plain + 16, "without"),
        text(LEFT + 112 + total * narrow, plain + 16, f"{total} passes", bold=True),
    ]
    key = (("the model's own token", OWN, None), ("accepted draft", GOOD, None), ("rejected draft", "none", VERMILLION))
    for index, (words, fill, stroke) in enumerate(key):
        x = LEFT + 100 + index * 190
        shapes.append(rect(x, 314, 22, 16, fill, stroke=stroke, dash=DASH if stroke else None))
        shapes.append(text(x + 30, 327, words, size=12))
    return _still("Tokens of each pass", *shapes)


# ---- their parts ---------------------------------------------------------------------------------


def _still(title: str, *elements: str) -> str:
    return svg(WIDTH, HEIGHT, text(LEFT, 30, title, size=15, bold=True), *elements, label=title)


def _text(step: Verified) -> tuple[list[str], list[tuple[float, float]]]:
    """Draw the text before the step; also return (x, width) of each of its tokens."""
    widths = [_chip_width(token.shown) for token in step.known]
    gap = min(3.0, (WIDTH - 2 * LEFT - sum(widths)) / max(len(widths) - 1, 1))
    shapes, places, x = [], [], float(LEFT)
    for token, width in zip(step.known, widths, strict=True):
        shapes.append(rect(x, TEXT_Y, width, CHIP, KNOWN, radius=4, label=token.shown, mono=True, size=11.5))
        places.append((x, width))
        x += width + gap
    return shapes, places


def _fed(step: Verified, y: float, name: str = "computed") -> list[str]:
    """Draw the last known token and the drafts that the pass computes."""
    shapes = [_name(y, name)]
    for place, token in enumerate((step.known[-1], *step.drafts)):
        shapes.append(_chip(_x(place), y, token.shown, DRAFT if place else OWN, ORANGE if place else None))
        position = len(step.known) - 1 + place
        shapes.append(text(_x(place) + WIDE + 5, y + 18, f"at {position}", size=11, colour=QUIET))
    return shapes


def _says(step: Verified, kept: int | None = None) -> list[str]:
    """Draw the model and its most likely token after each position; if `kept` is given, the first
    `kept` are green and the rest grey.
    """
    wide = (len(step.says) - 1) * COLUMN + WIDE
    shapes = [rect(_x(0), MODEL_Y, wide, 30, tint(BLUE, 0.12), stroke=QUIET, label="the model: one pass, all rows")]
    shapes.append(_name(SAYS_Y, "predicted"))
    for place, token in enumerate(step.says):
        shapes.append(arrow((_centre(place), MODEL_Y + 30), (_centre(place), SAYS_Y - 2)))
        dropped = kept is not None and place >= kept
        fill = tint(BLUE, 0.12) if kept is None else BLANK if dropped else GOOD
        shapes.append(_chip(_x(place), SAYS_Y, token.shown, fill, RULE if dropped else None, dropped))
    return shapes


def _slots(step: Verified) -> list[str]:
    """Draw the keys and values that the pass has written: those that stay valid, and those of
    rejected drafts.
    """
    shapes = [_name(SLOTS_Y, "keys, values")]
    computed = len(step.known) + step.num_accepted
    for place in range(len(step.says)):
        counts = len(step.known) + place <= computed
        words = "counts" if counts else "overwritten"
        fill, stroke = (KNOWN, None) if counts else (BLANK, RULE)
        shapes.append(_chip(_x(place), SLOTS_Y, words, fill, stroke, not counts, mono=False))
    before = len(step.known) + len(step.drafts)
    change = f"{before} → {computed}" if computed < before else str(computed)
    shapes.append(text(LEFT, SLOTS_Y - 10, f"num_computed_tokens: {change}", size=12, mono=True))
    return shapes


def _chip(
    x: float, y: float, content: str, fill: str, stroke: str | None = None, dashed: bool = False, mono: bool = True
) -> str:
    dash = DASH if dashed else None
    return rect(x, y, WIDE, CHIP, fill, stroke=stroke, dash=dash, radius=4, label=content, mono=mono, size=12)


def _fitting(x: float, y: float, width: float, content: str) -> str:
    """Draw a token in a narrow cell, truncated if it does not fit at 11 pixels."""
    most = int(width / 6.7)
    shown = content if len(content) <= most else content[: most - 1] + "…"
    return text(x + width / 2, y + 16, shown, size=11, anchor="middle", mono=True)


def _frame(x: float, width: float, colour: str, dash: str | None = None) -> str:
    return rect(x - 1, TEXT_Y - 3, width + 2, CHIP + 6, stroke=colour, stroke_width=2.5, radius=5, dash=dash)


def _first_place(step: Verified) -> int:
    """Return the first position of the text's last token."""
    ids = [token.id for token in step.known]
    return ids.index(ids[-1])


def _middle(place: tuple[float, float]) -> float:
    return place[0] + place[1] / 2


def _x(place: int) -> float:
    return LEFT + NAMES + place * COLUMN


def _centre(place: int) -> float:
    return _x(place) + WIDE / 2


def _name(y: float, name: str) -> str:
    return text(LEFT, y + 18, name, colour=QUIET)


def _chip_width(piece: str) -> float:
    return max(19.0, len(piece) * 7.2 + 8)


def _listed(tokens: tuple[Token, ...]) -> str:
    return " ".join(token.shown for token in tokens)
