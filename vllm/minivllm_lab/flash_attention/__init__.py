"""Code that only lesson 03 uses."""
