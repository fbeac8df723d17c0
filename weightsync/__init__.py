"""weightsync brings a trainer's sharded weights into running SGLang engines after each training step.

with weightsync.launch("configs/sgl_dtensor_v2.yaml", publishers=addresses, engines=urls) as sync:
    report = sync.push(step)
"""

from weightsync.errors import (
    ConfigError,
    EngineLost,
    EngineRejected,
    EnvError,
    PlanError,
    StaleVersion,
    TransferError,
    TransferTimeout,
    VerifyMismatch,
    WeightSyncError,
)
from weightsync.reports import SyncReport
from weightsync.sync import WeightSync, connect, launch

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "EngineLost",
    "EngineRejected",
    "EnvError",
    "PlanError",
    "StaleVersion",
    "SyncReport",
    "TransferError",
    "TransferTimeout",
    "VerifyMismatch",
    "WeightSync",
    "WeightSyncError",
    "connect",
    "launch",
]
