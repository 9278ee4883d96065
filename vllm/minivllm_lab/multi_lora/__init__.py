"""Code that only lesson 12 uses."""
