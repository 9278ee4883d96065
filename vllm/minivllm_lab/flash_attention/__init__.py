"""What lesson 03 alone uses."""
