"""What lesson 12 alone uses."""
