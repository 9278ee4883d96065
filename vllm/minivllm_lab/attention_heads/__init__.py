"""Code that only lesson 09 uses."""
