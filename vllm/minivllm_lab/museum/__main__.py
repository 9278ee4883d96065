"""The entry point of `python -m minivllm_lab.museum`; the commands are in
`minivllm_lab.museum.desk`.
"""

from minivllm_lab.cli import run
from minivllm_lab.museum.desk import main, parser

if __name__ == "__main__":
    run(main, parser())
