"""What lesson 09 alone uses."""
