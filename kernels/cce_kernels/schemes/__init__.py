"""The backward pass: three products from stored exponentials, or four with the logits made again."""
