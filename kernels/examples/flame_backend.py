"""flame: a file for its option `--experimental.custom_model_path`. FLA's fused loss then computes with this package."""

from cce_kernels import register_in_fla

register_in_fla()  # FLA_CCE=0 in the environment switches it off
