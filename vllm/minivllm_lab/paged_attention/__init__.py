"""What lesson 02 alone uses."""
