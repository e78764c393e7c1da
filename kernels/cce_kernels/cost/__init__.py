"""The cost of a causal language model's head and loss, and of ours in their place."""
