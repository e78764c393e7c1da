"""The loss with its vocabulary spread over the ranks of a process group."""
