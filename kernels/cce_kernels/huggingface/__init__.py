"""The loss in a causal language model of transformers or flash-linear-attention."""
