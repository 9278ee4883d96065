"""What lesson 07 alone uses."""
