"""Lightning callbacks; installed, and always imported, as `hiremate_lightning.callbacks`."""

if __name__ == "callbacks":  # imported from a checkout: this would make a second copy of each class
    raise ImportError("Import hiremate_lightning.callbacks instead of callbacks.")

from hiremate_lightning.callbacks.batch_size import HiRemateBatchSizeFinder
from hiremate_lightning.callbacks.memory_monitor import MemoryMonitor
from hiremate_lightning.callbacks.planning import HiRemateCallback

__all__ = ["HiRemateBatchSizeFinder", "HiRemateCallback", "MemoryMonitor"]
