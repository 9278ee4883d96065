"""`python -m minivllm`: the same as the command `minivllm`."""

from minivllm.entrypoints.cli.main import run

if __name__ == "__main__":
    run()
