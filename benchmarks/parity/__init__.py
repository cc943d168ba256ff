"""The parity studies of benchmarks/gpt_parity.py: arms, models, text, runs in pieces, statistics.

The loop, its state between two pieces, the arms' blocks and the statistics are the library's (fp8_ds.parity,
fp8_ds.comparison), as `fp8-ds parity` has them for a model of yours.
"""
