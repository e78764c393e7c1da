"""Peak rates of GPUs from their datasheets, and the shares of a peak that runs reach."""

import re

# Share of the peak that a 1.2 B model reached on an H200: 0.41 for GLA (bf16 autocast, compiled loss, 16,384 tokens a
# step). Small models reach much less, because their kernels are short.
ASSUMED_MFU = 0.4
# Share of a large matrix product's rate that whole steps reached on one CPU core. Size smoke: 0.33 (KDA) to 0.62
# (Transformer). Size mve: 0.76 to 0.80.
ASSUMED_CPU_SHARE = 0.5

# Words that a device's name must have -> dense FLOP/s with fp32 accumulation (bf16, fp32 without TF32). The first match
# wins. Source: NVIDIA's datasheets and architecture white papers; their sparse figures are halved.
_PEAKS: tuple[tuple[tuple[str, ...], tuple[float, float]], ...] = (
    (("B200",), (2250e12, 75e12)),  # HGX B200: 36 PFLOP/s sparse for eight
    (("GH200",), (989e12, 67e12)),  # GH200 datasheet
    (("H200", "NVL"), (835e12, 60e12)),  # H200 datasheet, NVL column
    (("H200",), (989e12, 67e12)),  # H200 datasheet, SXM column
    (("H100", "NVL"), (835e12, 60e12)),  # H100 datasheet, NVL column
    (("H100", "PCIE"), (756e12, 51e12)),  # H100 PCIe product brief
    (("H100",), (989e12, 67e12)),  # H100 datasheet, SXM column
    (("A100",), (312e12, 19.5e12)),  # A100 datasheet
    (("L40S",), (362e12, 91.6e12)),  # L40S datasheet
    (("L4",), (121e12, 30.3e12)),  # L4 datasheet
    (("A10",), (125e12, 31.2e12)),  # A10 datasheet
    (("4090",), (165e12, 82.6e12)),  # Ada architecture white paper, appendix A
    (("3090",), (71e12, 35.6e12)),  # Ampere GA102 white paper, appendix A
)
# A name with one of these words is a slice of a GPU, or another chip with the same number.
_NOT_THAT_DEVICE = {"MIG", "LAPTOP", "TI", "D", "SUPER"}


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in FLOP/s; None for CPUs and devices that are not in the table (MFU is then null).

    Args:
        device_name: as `torch.cuda.get_device_name()` returns it.
        precision: fp32 | bf16_autocast | bf16.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _NOT_THAT_DEVICE:
        return None
    for needed, (bf16, fp32) in _PEAKS:
        if words.issuperset(needed):
            return fp32 if precision == "fp32" else bf16
    return None
