"""Code that only lesson 05 uses."""
