"""Draw lesson 07's pictures. The moving one: drafts looked up in the followed request's own text,
the pass that verifies them, and the tokens kept.

The request runs on for 27 tokens. The stills show one of its steps whose drafts are all rejected,
and one whose drafts are all accepted. Lookups in this text are right or wrong as a whole, so a
third step comes from the same request with a draft model, where two of three drafts are accepted.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, CacheConfig
from minivllm.worker.model_runner import ExecuteModelState
from minivllm_lab.cli import warnings_only
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.engines.recording import add_greedy, bare_engine
from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, line, rect, svg, text
from minivllm_lab.pictures.followed import BLOCK_SIZE, NAME, PROMPT, Token, tokenizer, tokens_of
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import ORANGE
from minivllm_lab.speculative_decoding import pictures
from minivllm_lab.speculative_decoding.pictures import ACCEPTED, DRAFT, KNOWN, LEFT, OWN, REJECTED, WIDTH, chip

HEIGHT = 350
MAX_TOKENS, NUM_DRAFTS = 27, 3
TEXT_Y, FED_Y, MODEL_Y, PREDICTED_Y, VERDICT_Y, SLOTS_Y, LEGEND_Y = 50, 112, 150, 198, 242, 272, 320
NAMES, COLUMN, WIDE, TALL = 112, 143, 100, 26
"""Width of the names at the left, of a column of the pass and of a chip in it, and height of a
chip.
"""
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT_MODEL = {"method": "draft_model", "model": str(EMBEDDED_DRAFT)}
LEGEND = (("known", KNOWN), ("draft", DRAFT), ("accepted", ACCEPTED), ("rejected", REJECTED), ("the model's own", OWN))


class Verified(NamedTuple):
    """A step of the request: the tokens before it, its drafts, the model's most likely token after
    the last known one and after each draft, and the tokens that are kept.
    """

    number: int
    known: tuple[Token, ...]
    drafts: tuple[Token, ...]
    predicted: tuple[Token, ...]
    kept: tuple[Token, ...]

    @property
    def num_accepted(self) -> int:
        """Number of accepted drafts."""
        return len(self.kept) - 1


def frames() -> Frames:
    """Draw a guess, the pass that verifies it, three verdicts, and the tokens of all steps."""
    looked_up, drafted = recorded(), recorded("draft_model")
    bad = next(step for step in looked_up if len(step.drafts) == NUM_DRAFTS and step.known[-1].text == "def")
    good = next(step for step in looked_up if step.num_accepted == NUM_DRAFTS)
    partly = [step for step in drafted if step.num_accepted == NUM_DRAFTS - 1][-1]
    assert good.number - bad.number == 5, "a caption counts the steps"
    last, own = f"“{bad.known[-1].shown}”", f"“{bad.predicted[0].shown}”"
    replaced, by = f"“{partly.drafts[-1].shown}”", f"“{partly.kept[-1].shown}”"
    drawn = [
        _lookup(bad),
        _pass(bad, f"Step {bad.number}: one pass"),
        _verdict(bad, f"Step {bad.number}: 1 token"),
        _verdict(good, f"Step {good.number}: 4 tokens"),
        _verdict(partly, f"Another run, with a draft model: {len(partly.kept)} tokens"),
        _by_step(looked_up),
    ]
    captions = [
        f"{last} has just been sampled. It occurred before, so the three tokens that followed it are the drafts.",
        "One pass over four tokens reads the weights once, and predicts what comes after each of them.",
        f"The model predicts {own}, so the first draft is rejected. The others are too late.",
        "Five steps later all three drafts are right. The last row adds a bonus: four tokens, one pass.",
        f"A draft model's guess: two accepted, {replaced} replaced by {by}. The next step overwrites its keys.",
        f"{MAX_TOKENS} tokens in {len(looked_up)} passes: rejected drafts cost a little work, and change no token.",
    ]
    return Frames(drawn, captions)


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {"bet": pictures.bet(), "reveal": pictures.reveal(), "tree": pictures.tree()}


@cache
def recorded(method: str = "ngram") -> list[Verified]:
    """Record every step of the followed request, greedy, with up to three drafts: by suffixes of
    one to three tokens (ngram), or by the embedded draft model (draft_model).
    """
    drafting = {**(LOOKUP if method == "ngram" else DRAFT_MODEL), "num_speculative_tokens": NUM_DRAFTS}
    blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=16, enable_prefix_caching=True)
    settings = {"max_model_len": 48, "max_num_seqs": 1, "dtype": "float32", "speculative_config": drafting}
    with warnings_only():
        core = bare_engine(EMBEDDED_MODEL, torch.device("cpu"), blocks, **settings)
    runner, ids, verified = runner_of(core), tokenizer().encode(PROMPT).ids, []
    sample = type(runner).sample

    def noted(step: ExecuteModelState, *others: Any) -> Any:
        predicted = runner.model.compute_logits(step.hidden).argmax(-1).tolist()
        output: Any = sample(runner, step, *others)
        kept = output.sampled_token_ids[NAME]
        drafts = step.inputs.drafts.get(NAME, [])
        verified.append(Verified(len(verified) + 1, *map(tokens_of, (ids, drafts, predicted, kept))))
        ids.extend(kept)
        return output

    # Note the model's predictions at the drafts' positions.
    runner.sample = noted  # type: ignore[method-assign]
    add_greedy(core, NAME, list(ids), MAX_TOKENS)
    while core.has_unfinished_requests():
        core.step()
    return verified


# ---- the stills ----------------------------------------------------------------------------------


def _lookup(step: Verified) -> str:
    """Draw the text, the first occurrence of its last token, and the drafts that followed there."""
    shapes, places = _text(step)
    ids = [token.id for token in step.known]
    first = ids.index(ids[-1])
    y = TEXT_Y + TALL + 20
    start, end = _middle(places[-1]), _middle(places[first])
    shapes += [_frame(*places[index]) for index in (first, len(places) - 1)]
    shapes += [_frame(*places[first + 1 + index], dash="4 3") for index in range(len(step.drafts))]
    shapes += [
        line((start, y - 14), (start, y), ORANGE, width=2),
        line((start, y), (end, y), ORANGE, width=2),
        arrow((end, y), (end, y - 14), ORANGE, width=2),
        text(end + 14, y + 18, "the same token, earlier", colour=QUIET),
    ]
    return _still(f"Step {step.number}: a guess", *shapes, *_fed(step, FED_Y + 50, "the next pass"))


def _pass(step: Verified, title: str, *shapes: str, fills: list[str] | None = None) -> str:
    """Draw one pass over the last token and the drafts, and the model's prediction after each."""
    end = _x(len(step.drafts)) + WIDE
    model = rect(_x(0), MODEL_Y, end - _x(0), 30, BLANK, stroke=QUIET, label="the model: one pass, all rows")
    predictions = [_name(PREDICTED_Y, "predicted")]
    for place, token in enumerate(step.predicted):
        middle = _x(place) + WIDE / 2
        predictions.append(arrow((middle, MODEL_Y + 30), (middle, PREDICTED_Y - 2)))
        fill = fills[place] if fills else OWN
        predictions.append(chip(_x(place), PREDICTED_Y, WIDE, TALL, fill, token.shown))
    return _still(title, *_text(step)[0], *_fed(step, FED_Y, "fed"), model, *predictions, *shapes)


def _verdict(step: Verified, title: str) -> str:
    """Draw the pass, which drafts are accepted, and what becomes of their slots."""
    accepted, computed = step.num_accepted, len(step.known) + step.num_accepted
    verdicts = ["accepted"] * accepted + ["rejected"] + ["too late"] * NUM_DRAFTS
    verdicts = [f"{word}: {draft.shown}" for word, draft in zip(verdicts, step.drafts, strict=False)]
    verdicts.append("a bonus" if accepted == NUM_DRAFTS else "")
    fills = [ACCEPTED] * accepted + [OWN] + [REJECTED] * NUM_DRAFTS
    shapes = [_name(VERDICT_Y - 18, "next draft"), _name(SLOTS_Y, "keys, values")]
    for place in range(len(step.predicted)):
        shapes.append(text(_x(place) + WIDE / 2, VERDICT_Y, verdicts[place], anchor="middle", bold=True))
        fill, state = (KNOWN, "valid") if place <= accepted else (REJECTED, "stale")
        shapes.append(chip(_x(place), SLOTS_Y, WIDE, TALL, fill, state))
    before = len(step.known) + len(step.drafts)
    change = f"num_computed_tokens: {before}" + f" → {computed}" * (computed < before)
    shapes.append(text(_x(0), SLOTS_Y - 10, change, size=12, mono=True))
    return _pass(step, title, *shapes, fills=fills)


def _by_step(steps: list[Verified]) -> str:
    """Draw each step's tokens as a stack, and below them one step per token without drafts."""
    left, wide, floor, plain = LEFT + 92, 18, 180, 230
    shapes = [text(LEFT, floor - 9, "with drafts"), text(LEFT, plain + 17, "without")]
    for index, step in enumerate(steps):
        num_rejected = len(step.drafts) - step.num_accepted
        fills = [ACCEPTED] * step.num_accepted + [OWN] + [REJECTED] * num_rejected
        for level, fill in enumerate(fills, start=1):
            shapes.append(chip(left + index * wide, floor - level * (TALL + 3), wide - 3, TALL, fill))
    shapes += [chip(left + index * wide, plain, wide - 3, TALL, OWN) for index in range(MAX_TOKENS)]
    for y, count in ((floor - 10, len(steps)), (plain + 18, MAX_TOKENS)):
        shapes.append(text(left + count * wide + 8, y, f"{count} passes", bold=True))
    return _card("The tokens of each pass", *shapes, *pictures.legend_at(LEGEND_Y, LEGEND[2:]))


# ---- their parts ---------------------------------------------------------------------------------


def _card(title: str, *elements: str) -> str:
    return svg(WIDTH, HEIGHT, text(LEFT, 30, title, size=16, bold=True), *elements, label=title)


def _still(title: str, *elements: str) -> str:
    return _card(title, *elements, *pictures.legend_at(LEGEND_Y, LEGEND))


def _text(step: Verified) -> tuple[list[str], list[tuple[float, float]]]:
    """Draw the text before the step; also return (x, width) of each of its tokens."""
    shapes, places, x = [], [], float(LEFT)
    for token in step.known:
        width = max(19.0, len(token.shown) * 7.2 + 8)
        shapes.append(chip(x, TEXT_Y, width, TALL, KNOWN, token.shown, 11.5))
        places.append((x, width))
        x += width + 3
    return shapes, places


def _fed(step: Verified, y: float, name: str) -> list[str]:
    """Draw the last known token and the drafts that the pass computes."""
    shapes = [_name(y, name)]
    for place, token in enumerate((step.known[-1], *step.drafts)):
        shapes.append(chip(_x(place), y, WIDE, TALL, DRAFT if place else KNOWN, token.shown))
        position = len(step.known) - 1 + place
        shapes.append(text(_x(place) + WIDE + 4, y + 18, f"at {position}", size=12, colour=QUIET))
    return shapes


def _frame(x: float, width: float, dash: str | None = None) -> str:
    return rect(x - 1, TEXT_Y - 3, width + 2, TALL + 6, stroke=ORANGE, stroke_width=2.5, radius=5, dash=dash)


def _middle(place: tuple[float, float]) -> float:
    return place[0] + place[1] / 2


def _x(place: int) -> float:
    return LEFT + NAMES + place * COLUMN


def _name(y: float, name: str) -> str:
    return text(LEFT, y + 18, name, colour=QUIET)
