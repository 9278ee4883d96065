"""Code that only lesson 07 uses."""
