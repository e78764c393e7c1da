"""How a step's passes are executed: replayed from a CUDA graph."""
