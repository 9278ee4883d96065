"""What lesson 11 alone uses."""
