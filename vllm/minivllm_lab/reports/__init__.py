"""Output, figures and command lines of the lesson scripts: one module per lesson."""
