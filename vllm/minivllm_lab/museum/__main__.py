"""`python -m minivllm_lab.museum`: see `minivllm_lab.museum.desk`."""

from minivllm_lab.cli import run
from minivllm_lab.museum.desk import main, parser

if __name__ == "__main__":
    run(main, parser())
