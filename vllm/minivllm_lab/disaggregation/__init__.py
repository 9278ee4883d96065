"""Code that only lesson 08 uses."""
