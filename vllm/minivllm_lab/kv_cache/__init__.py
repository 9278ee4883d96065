"""Code that only lesson 01 uses."""
