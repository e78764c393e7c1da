"""How a step is executed: kernels compiled ahead on all cores, products in float8, replays of a CUDA graph."""
