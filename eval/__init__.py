"""Judging a map: arms on the same documents, fidelity, statistics, results."""

from kvbridge.eval.fidelity import EvalConfig, evaluate
from kvbridge.eval.gate import GateReport, identity_gate
from kvbridge.eval.results import build_results, write_results

__all__ = ["EvalConfig", "GateReport", "build_results", "evaluate", "identity_gate", "write_results"]
