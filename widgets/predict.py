"""Predict the next step of vLLM's scheduler in a notebook: the rounds of `make predict`.

    from widgets import predict
    predict.show()

The game is the site's own (`minivllm_lab/predict/game.js`) and needs no kernel once it is drawn.
"""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

from minivllm_lab.predict import page

HERE = Path(page.__file__).parent
RENDER = """
export default {
  render({ model, el }) {
    el.classList.add("predict");
    new Game(el, model.get("levels"), model.get("rules"));
  },
};
"""


class Predict(anywidget.AnyWidget):
    """The game: a recorded state, a form for the prediction, and vLLM's answer."""

    _esm = (HERE / "game.js").read_text() + RENDER
    _css = (HERE / "game.css").read_text()
    levels = traitlets.List().tag(sync=True)
    rules = traitlets.Dict().tag(sync=True)


def show() -> Predict:
    """Show all levels."""
    return Predict(levels=page.rounds(), rules=page.rules())
