"""Planning before training: the memory and time of a model on a cluster, and its best layouts."""

from lightning_parallel.planner.hardware import Cluster, Device, device_named
from lightning_parallel.planner.layouts import Layout, StepTime
from lightning_parallel.planner.plans import LayoutPlan, plan
from lightning_parallel.planner.rank_memory import RankMemory

__all__ = ["Cluster", "Device", "Layout", "LayoutPlan", "RankMemory", "StepTime", "device_named", "plan"]
