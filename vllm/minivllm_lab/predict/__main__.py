"""Play: `uv run python -m minivllm_lab.predict`."""

from minivllm_lab.predict.game import main

main()
