"""What lesson 10 alone uses."""
