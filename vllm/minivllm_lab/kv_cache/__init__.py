"""What lesson 01 alone uses."""
