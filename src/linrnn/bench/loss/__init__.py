"""The loss layer alone: time, memory and error of every backend."""
