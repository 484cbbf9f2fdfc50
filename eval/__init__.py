"""Judging a map: arms on the same documents, fidelity, statistics, results."""

from kvbridge.eval.config import EvalConfig
from kvbridge.eval.fidelity import evaluate
from kvbridge.eval.gate import GateReport, identity_gate
from kvbridge.eval.probe_results import ask_probes, summarise_probes
from kvbridge.eval.probes import ProbesConfig, build_probes
from kvbridge.eval.results import build_results, write_results

__all__ = [
    "EvalConfig",
    "GateReport",
    "ProbesConfig",
    "ask_probes",
    "build_probes",
    "build_results",
    "evaluate",
    "identity_gate",
    "summarise_probes",
    "write_results",
]
