"""64 to 1,024 GPUs on paper: writes results/scale_out.md. `python scripts/scale_out.py`."""

from pathlib import Path

from linrnn.scale_out import page

if __name__ == "__main__":
    path = Path(__file__).resolve().parents[1] / "results" / "scale_out.md"
    path.write_text(page() + "\n")
    print(f"wrote {path}")
