"""Where mutants were before the bug museum needed them too."""

from minivllm.lab.mutants import Mutant, load_mutant, mutant_source

__all__ = ["Mutant", "load_mutant", "mutant_source"]
