"""A run of two engines that ends as scripts do: the process group is destroyed, the engines are not.

    last_reports.py --local_rank=0 FOLDER

Both reach step 4. One reports steps 2 and 4 to DeepSpeed's CSV monitor, the other step 4 to a disk that is full.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
import training

folder = sys.argv[-1]
csv = {"enabled": True, "output_path": folder, "job_name": "csv"}
configs = [
    training.ds_config(2, {"monitor": {"every": 2}}, csv_monitor=csv),
    training.ds_config(2, {"monitor": {"every": 4, "sink": "/dev/full"}}),
]
engines = [training.build(config) for config in configs]  # alive until the process ends
for engine in engines:
    training.train(engine, 4)
dist.destroy_process_group()
