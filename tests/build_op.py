"""DeepSpeed's op for a CPU is built: g++ takes a minute or five for it, which belongs in no test's time-out."""

from deepspeed.comm.torch import build_shm_op

from fp8_ds.diagnosis import build_root, remove_abandoned

if __name__ == "__main__":
    remove_abandoned(build_root())
    build_shm_op()
