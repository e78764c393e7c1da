"""The loss doctor: what the head and the loss of a causal language model cost, and what ours would cost."""
