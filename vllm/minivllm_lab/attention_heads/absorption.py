"""Lesson 09's picture of absorption: scores by way of a key for each token, and without any key."""

from __future__ import annotations

from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, rect, svg, swatch, text, tint
from minivllm_lab.pictures.palette import BLUE, ORANGE, PURPLE

WIDTH, HEIGHT = 700, 344
LATENTS, KEYS, SCORES = ((3, 1), (1, 1)), ((3, 4), (1, 2)), (11, 5)
QUERY, ABSORBED_QUERY = (1, 2), (3, 2)
"""The lesson's example by hand, with W_UK = ((1, 0), (1, 1))."""
LATENT, KEY, ASKING = tint(PURPLE, 0.4), tint(ORANGE, 0.6), tint(BLUE, 0.75)
BOX, TALL, STEP = 104, 30, 40
LATENTS_X, KEYS_X, QUERY_X, SCORES_X = 24, 220, 416, 600
"""The left edges of latents, keys, queries and scores."""
PLAIN_Y, ABSORBED_Y = 62, 212


def absorption() -> str:
    """Draw both ways from two latents and a query to the same scores."""
    parts = [text(LATENTS_X, 34, "Plain: make a key of every cached token", size=14, bold=True)]
    parts += _way(PLAIN_Y, PLAIN_Y + 35)
    for row, key in enumerate(KEYS):
        y = PLAIN_Y + row * STEP
        parts.append(arrow((LATENTS_X + BOX + 4, y + 15), (KEYS_X - 4, y + 15)))
        parts.append(rect(KEYS_X, y, BOX, TALL, KEY, radius=3, label=f"key {key}"))
        parts.append(arrow((KEYS_X + BOX + 4, y + 15), (QUERY_X - 4, PLAIN_Y + 35)))
    parts.append(text((LATENTS_X + BOX + KEYS_X) / 2, PLAIN_Y - 4, "× W_UK", size=12, anchor="middle", mono=True))
    parts.append(rect(QUERY_X, PLAIN_Y + 20, BOX, TALL, ASKING, radius=3, label=f"query {QUERY}"))
    parts.append(text(LATENTS_X, 184, "Absorbed: move the matrix to the query, once", size=14, bold=True))
    parts += _way(ABSORBED_Y, ABSORBED_Y + 63)
    middle = QUERY_X + BOX / 2
    parts.append(rect(QUERY_X, ABSORBED_Y - 14, BOX, TALL, ASKING, radius=3, label=f"query {QUERY}"))
    parts.append(arrow((middle, ABSORBED_Y + 18), (middle, ABSORBED_Y + 46)))
    parts.append(text(middle + 8, ABSORBED_Y + 35, "× W_UKᵀ", size=12, mono=True))
    parts.append(rect(QUERY_X, ABSORBED_Y + 48, BOX, TALL, ASKING, radius=3, label=str(ABSORBED_QUERY)))
    for row in range(len(LATENTS)):
        start = (LATENTS_X + BOX + 4, ABSORBED_Y + row * STEP + 15)
        parts.append(arrow(start, (QUERY_X - 4, ABSORBED_Y + 63)))
    parts.append(rect(KEYS_X, ABSORBED_Y - 14, BOX, TALL, BLANK, stroke=QUIET, dash="4 3", label="no key", size=12))
    x = LATENTS_X
    for fill, words in ((LATENT, "latent: what the cache keeps"), (KEY, "key"), (ASKING, "query")):
        parts.append(swatch(x, HEIGHT - 30, fill, words, stroke=None))
        x += 60 + 7 * len(words)
    words = f"Latents {LATENTS}: keys {KEYS}, or the query as {ABSORBED_QUERY}. Scores {SCORES} both ways."
    return svg(WIDTH, HEIGHT, *parts, label=words)


def _way(y: float, query_y: float) -> list[str]:
    """Draw the latents on the left, and arrows from the query at `query_y` to the scores on the right."""
    parts = [text(SCORES_X, y - 4, "scores", size=12, colour=QUIET)]
    for row, (latent, score) in enumerate(zip(LATENTS, SCORES, strict=True)):
        top = y + row * STEP
        parts.append(rect(LATENTS_X, top, BOX, TALL, LATENT, radius=3, label=f"latent {latent}"))
        parts.append(text(SCORES_X, top + 21, str(score), size=16, bold=True))
        parts.append(arrow((QUERY_X + BOX + 4, query_y), (SCORES_X - 8, top + 15)))
    return parts
