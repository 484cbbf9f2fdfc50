"""MMLU's development questions, read at run time from the worked examples that lm-eval ships."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from datasets import Dataset

from kvbridge.errors import UsageError

SHIPPED = "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
_QUESTION = re.compile(
    r"(?P<question>.*?)\n\(A\)\s(?P<A>.*?)\s\(B\)\s(?P<B>.*?)\s\(C\)\s(?P<C>.*?)\s\(D\)\s(?P<D>.*?)"
    r"\nA: .*The answer is \((?P<answer>[ABCD])\)\.?\s*\Z",
    re.DOTALL,
)


def questions() -> list[dict[str, Any]]:
    """All questions with four choices: subject, question, choices, and the index of the answer.

    Of MMLU's 285, the file lacks three, and one has five choices and is left out.

    Raises:
        UsageError: this lm-eval does not ship them in a form that is understood.
    """
    path = files("lm_eval") / SHIPPED
    if not path.is_file():
        raise UsageError(
            f"the installed lm-eval has no {SHIPPED}; kvbridge_mmlu_dev needs lm_eval 0.4.13 or a near one."
        )
    found = []
    for subject, text in json.loads(path.read_text()).items():
        for block in re.split(r"(?:\A|\n)Q: ", text)[1:]:
            match = _QUESTION.fullmatch(block)
            if match:
                found.append(
                    {
                        "subject": subject.replace("_", " "),
                        "question": match["question"].strip(),
                        "choices": [match[letter].strip() for letter in "ABCD"],
                        "answer": "ABCD".index(match["answer"]),
                    }
                )
    if not found:
        raise UsageError(f"no question was understood in lm-eval's {SHIPPED}; use lm_eval 0.4.13.")
    return found


def dataset(**_: Any) -> dict[str, Dataset]:
    """What lm-eval loads for the task."""
    return {"test": Dataset.from_list(questions())}
