"""The systems that `make bench-peers` measures beside Penstock, one module each."""
