"""Code that only lesson 06 uses."""
