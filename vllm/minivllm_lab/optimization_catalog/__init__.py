"""What lesson 05 alone uses."""
