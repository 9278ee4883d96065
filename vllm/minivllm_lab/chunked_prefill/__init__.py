"""Code that only lesson 10 uses."""
