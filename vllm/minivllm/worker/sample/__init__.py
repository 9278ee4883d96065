"""From logits to tokens: penalties, biases, truncation, the random draw, log probabilities."""
