"""Code that only lesson 02 uses."""
