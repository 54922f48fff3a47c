"""Runs scripts/train.py under Accelerate's own FSDP2 on CPU processes, where Accelerate would choose DDP."""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from conftest import load_script


class ShardedAccelerator(Accelerator):
    """An accelerator that keeps to what the launcher's configuration says."""

    def __init__(self, **options):
        super().__init__(**options)
        engine = {"distributed_type": DistributedType.FSDP}
        AcceleratorState._shared_state |= {**engine, "fsdp_plugin": FullyShardedDataParallelPlugin()}
        PartialState._shared_state |= engine


if __name__ == "__main__":
    script = load_script("train")
    script.Accelerator = ShardedAccelerator
    script.main()
