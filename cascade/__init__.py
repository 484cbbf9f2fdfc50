"""Runtime, escalation policies, gate and fallback, sessions, exact mode."""

from kvbridge.cascade.exact import DraftSchedule
from kvbridge.cascade.gate import Gate, GateLimits, GateReading
from kvbridge.cascade.guard import Guarded, Judge, guarded_hand_off
from kvbridge.cascade.modes import Mode
from kvbridge.cascade.outcome import APPLIED, FALLBACK, OUTCOMES, UNSUPPORTED, Outcome
from kvbridge.cascade.policies import Above, AllOf, Always, AnyOf, Custom, LongPrompt, Never, OfTask, Policy, Rule
from kvbridge.cascade.result import HandoffReport, Result
from kvbridge.cascade.runtime import Cascade
from kvbridge.cascade.sampling import SamplingParams
from kvbridge.cascade.scores import FirstTokenEntropy, FirstTokenMargin, MeanSurprise, Progress
from kvbridge.cascade.session import Session
from kvbridge.cascade.store import StateStore

__all__ = [
    "APPLIED",
    "FALLBACK",
    "OUTCOMES",
    "UNSUPPORTED",
    "Above",
    "AllOf",
    "Always",
    "AnyOf",
    "Cascade",
    "Custom",
    "DraftSchedule",
    "FirstTokenEntropy",
    "FirstTokenMargin",
    "Gate",
    "GateLimits",
    "GateReading",
    "Guarded",
    "HandoffReport",
    "Judge",
    "LongPrompt",
    "MeanSurprise",
    "Mode",
    "Never",
    "OfTask",
    "Outcome",
    "Policy",
    "Progress",
    "Result",
    "Rule",
    "SamplingParams",
    "Session",
    "StateStore",
    "guarded_hand_off",
]
