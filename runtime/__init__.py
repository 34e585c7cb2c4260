"""Stages, channels, rings, drivers, and the manager that composes them."""

from ..fsm import AbortSource
from .channel import PushResult
from .config import RuntimeConfig
from .handle import Chunk, Completion, RequestHandle, Usage, acumulative, cumulative
from .manager import TokenizerManager
from .port import SchedulerPort
from .ring import egress_ring, ingress_ring
from .schedulers import EchoScheduler, MarkovScheduler
from .scripted import ScriptedScheduler
from .server_args import ServerArgs
from .simulation import Simulation
from .sink import EgressItem, SinkError
from .stages.tokenize import Encoder
from .stats import Stats
from .steps import StepBatch

__all__ = [
    "AbortSource",
    "Chunk",
    "Completion",
    "EchoScheduler",
    "EgressItem",
    "Encoder",
    "MarkovScheduler",
    "PushResult",
    "RequestHandle",
    "RuntimeConfig",
    "SchedulerPort",
    "ScriptedScheduler",
    "ServerArgs",
    "Simulation",
    "SinkError",
    "Stats",
    "StepBatch",
    "TokenizerManager",
    "Usage",
    "acumulative",
    "cumulative",
    "egress_ring",
    "ingress_ring",
]
