"""The loss inside a causal language model of transformers or flash-linear-attention."""
