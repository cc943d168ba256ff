"""Models of the parity studies."""
