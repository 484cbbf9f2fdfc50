"""A complete `results.json` with figures of our choice, for what is made from results alone."""

from __future__ import annotations

from typing import Any

from kvbridge.eval.fidelity import METRICS, EvalConfig
from kvbridge.eval.results import by_position, summarise_arms

# Mean KL and NLL that each arm is given; documents differ around them.
ARMS = {
    "native": (0.0, 1.0),
    "injected": (0.0001, 1.0),
    "mapped": (0.2, 1.1),
    "source": (0.5, 1.4),
    "tail_only": (0.6, 1.5),
    "other_document": (0.9, 1.9),
    "no_context": (1.2, 2.2),
}


def _document(number: int, arms: dict[str, tuple[float, float]]) -> dict[str, Any]:
    wobble = 1 + 0.1 * (number % 3)
    document: dict[str, Any] = {"id": f"d{number}"}
    for arm, (kl, nll) in arms.items():
        document[arm] = dict.fromkeys(METRICS, 0.5) | {
            "kl": kl * wobble,
            "nll": nll + 0.05 * number,
            "kl_by_position": [kl * wobble] * 8,
            "rollout_kl_by_position": [kl] * 4,
        }
    return document


def _geometry(layers: int) -> dict[str, Any]:
    return {"layers": layers, "kv_heads": 2, "head_dim": 16}


def results(arms: dict[str, tuple[float, float]] = ARMS, documents: int = 9) -> dict[str, Any]:
    """A complete `results.json` with figures of our choice."""
    records = [_document(number, arms) for number in range(documents)]
    config = EvalConfig(documents=documents)
    sides = {role: {"name": role, "revision": None, "fingerprint": "f" * 16} for role in ("source", "target")}
    return {
        "schema": 1,
        "run": {
            "finished": "2026-01-02T03:04:05+00:00",
            "versions": {"python": "3.11", "kvbridge": "0"},
            "git": None,
            "device": "cpu",
            "device_name": "a CPU",
            "threads": 2,
            "dtype": "bfloat16",
            "settings": {
                "pair": {"source": "A", "target": "B"},
                "mapper": {"name": "ridge", "k": 8},
                "plan": {"sinks": 4, "native_head": None, "native_tail": 16},
                "calibration": {"corpus": "text.jsonl", "seed": 0},
                "eval": {"corpus": "dev.jsonl", "seed": 0, "resamples": 2000},
            },
            "seeds": {"calibration": 0, "eval": 0},
            "seconds": {},
        },
        "pair": {
            "tokenizer": {"fingerprint": "t" * 16},
            "source": sides["source"] | {"geometry": _geometry(3)},
            "target": sides["target"] | {"geometry": _geometry(4)},
        },
        "mapper": {"name": "ridge", "k": 8},
        "plan": {"sinks": 4, "native_head": None, "native_tail": 16},
        "calibration": {"rows": 1000, "fingerprint": "c" * 16},
        "arms": summarise_arms(records, config),
        "documents": records,
        "by_position": by_position(records, list(arms)),
        "reconstruction": {"r2_keys": [[0.5, 0.6]] * 4, "r2_values": [[0.3, 0.4]] * 4, "rows_per_feature": 20.0},
        "selected_layers": {"keys": [[0, 1]] * 4, "values": [[0, 1]] * 4},
        "samples": [
            {
                "id": "d0",
                "prompt_end": "end",
                "gold": "gold",
                "continuations": dict.fromkeys(arms, "a <b> continuation"),
            }
        ],
        "cost": {
            "target_prefill_flops_share": 0.07,
            "flops_share_by_part": {"sinks": 0.01, "head": 0.0, "map": 0.02, "tail": 0.04},
            "equal_cost_tail": 30,
            "warm_ttft_s": 0.5,
            "cold_ttft_s": 1.0,
            "native_ttft_s": 2.0,
            "source_ttft_s": 0.5,
            "seconds_by_step": {},
            "mapping_tokens_per_s": 1000.0,
            "prompt_tokens": 448,
            "peak_memory_bytes": 10**9,
            "artifact_bytes": 10**7,
            "calibration_seconds": 60.0,
        },
    }
