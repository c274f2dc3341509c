"""What a capture assumed, and whether it still holds."""

from whence.guards.build import guards_of
from whence.guards.guarded import Guarded
from whence.guards.plan import GuardPlan, plan_of

__all__ = ["GuardPlan", "Guarded", "guards_of", "plan_of"]
