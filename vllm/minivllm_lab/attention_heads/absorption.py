"""Lesson 09's picture of absorption: scores by way of a key for each token, and without any key."""

from __future__ import annotations

from minivllm_lab.drawing import BLANK, QUIET, arrow, rect, svg, text, tint
from minivllm_lab.palette import BLUE, ORANGE, PURPLE

WIDTH, HEIGHT = 700, 344
LATENTS, KEYS, SCORES = ((3, 1), (1, 1)), ((3, 4), (1, 2)), (11, 5)
QUERY, ABSORBED_QUERY = (1, 2), (3, 2)
"""The lesson's example by hand, with W_UK = ((1, 0), (1, 1))."""
LATENT, KEY, ASKING = tint(PURPLE, 0.4), tint(ORANGE, 0.6), tint(BLUE, 0.75)
BOX, TALL, STEP = 104, 30, 40
COLUMNS = (24, 220, 416, 600)
"""The left edges of latents, keys, queries and scores."""
PLAIN_Y, ABSORBED_Y = 62, 212


def absorption() -> str:
    """Draw both ways from two latents and a query to the same scores."""
    latents_x, keys_x, query_x, _ = COLUMNS
    parts = [text(24, 34, "Plain: make a key of every cached token", size=14, bold=True)]
    parts += _way(PLAIN_Y, PLAIN_Y + 35)
    for row, key in enumerate(KEYS):
        y = PLAIN_Y + row * STEP
        parts.append(arrow((latents_x + BOX + 4, y + 15), (keys_x - 4, y + 15)))
        parts.append(rect(keys_x, y, BOX, TALL, KEY, radius=3, label=f"key {key}"))
        parts.append(arrow((keys_x + BOX + 4, y + 15), (query_x - 4, PLAIN_Y + 35)))
    parts.append(text((latents_x + BOX + keys_x) / 2, PLAIN_Y - 4, "× W_UK", size=12, anchor="middle", mono=True))
    parts.append(rect(query_x, PLAIN_Y + 20, BOX, TALL, ASKING, radius=3, label=f"query {QUERY}"))
    parts.append(text(24, 184, "Absorbed: move the matrix to the query, once", size=14, bold=True))
    parts += _way(ABSORBED_Y, ABSORBED_Y + 63)
    middle = query_x + BOX / 2
    parts.append(rect(query_x, ABSORBED_Y - 14, BOX, TALL, ASKING, radius=3, label=f"query {QUERY}"))
    parts.append(arrow((middle, ABSORBED_Y + 18), (middle, ABSORBED_Y + 46)))
    parts.append(text(middle + 8, ABSORBED_Y + 35, "× W_UKᵀ", size=12, mono=True))
    parts.append(rect(query_x, ABSORBED_Y + 48, BOX, TALL, ASKING, radius=3, label=str(ABSORBED_QUERY)))
    for row in range(len(LATENTS)):
        start = (latents_x + BOX + 4, ABSORBED_Y + row * STEP + 15)
        parts.append(arrow(start, (query_x - 4, ABSORBED_Y + 63)))
    parts.append(rect(keys_x, ABSORBED_Y - 14, BOX, TALL, BLANK, stroke=QUIET, dash="4 3", label="no key", size=12))
    x = 24
    for fill, words in ((LATENT, "latent: what the cache keeps"), (KEY, "key"), (ASKING, "query")):
        parts += [rect(x, HEIGHT - 30, 22, 14, fill), text(x + 30, HEIGHT - 18, words, size=12)]
        x += 60 + 7 * len(words)
    words = f"Latents {LATENTS}: keys {KEYS}, or the query as {ABSORBED_QUERY}. Scores {SCORES} both ways."
    return svg(WIDTH, HEIGHT, *parts, label=words)


def _way(y: float, query_y: float) -> list[str]:
    """Draw the latents on the left, and arrows from the query at `query_y` to the scores on the right."""
    parts = [text(COLUMNS[-1], y - 4, "scores", size=12, colour=QUIET)]
    for row, (latent, score) in enumerate(zip(LATENTS, SCORES, strict=True)):
        top = y + row * STEP
        parts.append(rect(COLUMNS[0], top, BOX, TALL, LATENT, radius=3, label=f"latent {latent}"))
        parts.append(text(COLUMNS[-1], top + 21, str(score), size=16, bold=True))
        parts.append(arrow((COLUMNS[2] + BOX + 4, query_y), (COLUMNS[-1] - 8, top + 15)))
    return parts
