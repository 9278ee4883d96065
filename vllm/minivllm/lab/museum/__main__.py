"""`python -m minivllm.lab.museum`: see `minivllm.lab.museum.desk`."""

from minivllm.lab.cli import run
from minivllm.lab.museum.desk import main, parser

if __name__ == "__main__":
    run(main, parser())
