"""How kernels are launched, and on what: devices, tiles, the interpreter."""
