"""Draw `lessons/figures/05_graph_replay.svg`: a step launched kernel by kernel, and the same step
replayed as a graph.
"""

from minivllm_lab import palette
from minivllm_lab.drawing import QUIET, line, rect, svg, text, tint


def graph_replay() -> str:
    """Draw the SVG, which is not to scale."""
    launch, kernel, left, count = 74, 34, 120, 8
    ways = {
        "one by one": ([(launch * place, launch) for place in range(count)],
                       [(launch * (place + 1), kernel) for place in range(count)]),
        "as a graph": ([(0, launch)], [(launch + kernel * place, kernel) for place in range(count)]),
    }  # fmt: skip
    shapes = [text(20, 28, "The same eight kernels (not to scale)", bold=True)]
    for index, (name, (launches, kernels)) in enumerate(ways.items()):
        y = 52 + 112 * index
        shapes += [text(20, y + 12, name), text(104, y + 33, "host", anchor="end", colour=QUIET)]
        shapes.append(text(104, y + 67, "GPU", anchor="end", colour=QUIET))
        words = "launch" if len(launches) > 1 else "replay"
        shapes += [
            rect(left + x, y + 18, w - 4, 22, tint(palette.ORANGE, 0.4), label=words, size=12) for x, w in launches
        ]
        shapes += [rect(left + x, y + 52, w - 4, 22, tint(palette.BLUE, 0.45)) for x, w in kernels]
        end = left + kernels[-1][0] + kernels[-1][1]
        shapes.append(line((end, y + 14), (end, y + 82), palette.INK, dash="3 3"))
        shapes.append(text(end - 6, y + 92, "the step ends", size=12, anchor="end"))
    label = "Launched one by one, the GPU waits between kernels; replayed as a graph, they follow one another"
    return svg(left + launch * count + kernel + 20, 272, *shapes, label=label) + "\n"
