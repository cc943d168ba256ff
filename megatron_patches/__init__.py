"""FP8 for Megatron-LM's pretrain_gpt.py: docs/megatron.md.

Importing this package imports no Megatron and changes nothing. patches.py lists what is touched, and undoes it.
"""
