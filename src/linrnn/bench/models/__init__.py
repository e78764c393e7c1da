"""Training steps of Hugging Face models where the loss alone differs: time, memory and the loss's value."""
