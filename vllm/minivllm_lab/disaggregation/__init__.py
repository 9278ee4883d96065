"""What lesson 08 alone uses."""
