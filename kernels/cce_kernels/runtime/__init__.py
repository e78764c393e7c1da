"""How kernels are launched: devices, tile sizes, quick launches, Triton's interpreter."""
