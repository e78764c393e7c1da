"""The two schemes of the backward pass: three products with stored exponentials, or four with recomputed logits."""
