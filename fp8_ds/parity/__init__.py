"""Paired training runs that differ in the "fp8" block only: resumable, compared by fp8_ds.comparison.

`fp8-ds parity` runs them on a user's model (study.py starts worker.py); benchmarks/gpt_parity.py on its own.
"""
