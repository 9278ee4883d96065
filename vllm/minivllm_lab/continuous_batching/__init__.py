"""Code that only lesson 04 uses."""
