"""`python -m minivllm`: the same as the command `minivllm`."""

import sys

from minivllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
