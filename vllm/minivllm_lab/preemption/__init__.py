"""Code that only lesson 11 uses."""
