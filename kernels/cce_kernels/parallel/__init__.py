"""Vocabulary parallelism: the loss with the vocabulary sharded over the ranks of a process group."""
