"""A pair as a language model of lm-eval, so that every task that it knows can be scored on a carried cache.

context     [ sinks | carried ………………………………… | tail ]      read once for all continuations that share it
continuation                                        [ a b c ]
logits                                     of tail, a b   predict   a b c

The class extends lm-eval's `TemplateLM`, which splits context from continuation, and not its Hugging Face model:
that one loads a single model, pads contexts on the left (positions of a hand-off are absolute) and sends context and
continuation through one forward pass, so all of its own methods would have to be replaced.

Importing this module needs lm-eval and registers the model under the name `kvbridge`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm.auto import tqdm

from kvbridge import compat
from kvbridge.assembly import hand_off
from kvbridge.bridge import Bridge
from kvbridge.cascade.text import end_tokens
from kvbridge.errors import UsageError
from kvbridge.eval.arms import Reading, read_prompt
from kvbridge.eval.retention import ARMS
from kvbridge.eval.sampling import Sampling
from kvbridge.forms import Map
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair, load_pair
from kvbridge.plan import HandoffPlan

# One token is at least a byte, so a stop string lies within its bytes' number of last tokens, with some to spare.
SPARE = 8
PLAN = tuple(each.name for each in fields(HandoffPlan))


@dataclass(slots=True)
class ContextCounts:
    """What became of the contexts that were read.

    Attributes:
        read: distinct contexts.
        carried: those of which the plan carried something.
        truncated: those that were cut on the left to fit the pair.
    """

    read: int = 0
    carried: int = 0
    truncated: int = 0


class PairLM(TemplateLM):
    """One arm of a pair: the source alone, the target alone, or the target on a cache that a map carried to it.

    Every context is read once, whatever the number of its continuations; where it leaves nothing to carry, the
    target reads it natively, and `counts` says how often.

    Args:
        pair: source and target.
        arm: `source`, `native` or `mapped`.
        plan: what the target computes natively.
        mapping: from source to target content states; only `mapped` needs it.

    Raises:
        UsageError: the arm is unknown, or `mapped` has no map.
        PlanError: the plan leaves no layer to map.
        CacheError: plan and map do not fit each other.
    """

    def __init__(self, pair: ModelPair, arm: str, plan: HandoffPlan, mapping: Map | None = None) -> None:
        super().__init__()
        if arm not in ARMS:
            raise UsageError(f"arm={arm}: expected one of {', '.join(ARMS)}.")
        if arm == "mapped" and mapping is None:
            raise UsageError("arm=mapped needs a map; give bridge=DIR.")
        plan.mapped_layers(pair.target.geometry.layers)
        if isinstance(mapping, FormMap):
            mapping.require_plan(plan, pair.target.geometry.layers)
        self.pair, self.arm, self.mapping, self.plan = pair, arm, mapping, plan
        self.tokenizer: Any = pair.tokenizer
        self.counts = ContextCounts()
        self.bar_title = f"lm-eval {arm}"
        self._device = pair.target.device

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> PairLM:
        """What `create_from_arg_obj` makes, from `name=value,…`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> PairLM:
        """Load what lm-eval's `--model_args` name; of lm-eval's own settings only the device is read.

        Raises:
            UsageError: an argument is unknown or missing, or what loading raises.
        """
        given = dict(arg_dict)
        device = (additional_config or {}).get("device") or "auto"
        # lm-eval says cuda:0 where its user says nothing.
        given.setdefault("device", device if torch.cuda.is_available() or not device.startswith("cuda") else "auto")
        plan = {name: given.pop(name) for name in PLAN if name in given}
        if str(plan.get("native_head")).lower() in ("none", "null"):
            plan["native_head"] = None
        arm, bridge, name = given.pop("arm", "mapped"), given.pop("bridge", None), given.pop("map", None)
        names = ("source", "target", "source_revision", "target_revision", "dtype", "device", "trust_remote_code")
        unknown = sorted(given.keys() - set(names))
        if unknown or "source" not in given:
            raise UsageError(
                f"--model_args {'has ' + unknown[0] if unknown else 'lacks source'}; expected "
                f"{', '.join((*names, 'bridge', 'map', 'arm', *PLAN))}."
            )
        pair = load_pair(**given)
        if not bridge:
            return cls(pair, arm, HandoffPlan(**plan))
        mapping = FormMap.of(Bridge.from_pretrained(bridge, pair=pair), name, device=pair.target.device)
        return cls(pair, arm, HandoffPlan(**plan), mapping)

    @property
    def max_length(self) -> int:
        """Tokens that both models can read."""
        return self.pair.max_positions

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say."""
        return 256

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, but no second one before a text that has it already."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id]))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def read(self, context: list[int]) -> Reading:
        """This arm's cache for a context, and the logits that follow it."""
        prompt = torch.tensor([context])
        self.counts.read += 1
        if self.arm == "source":
            return read_prompt(self.pair.source, prompt)
        if self.arm == "native" or self.mapping is None or not self.plan.split(len(context)).carried:
            return read_prompt(self.pair.target, prompt)
        self.counts.carried += 1
        target = self.pair.target
        states = self.pair.source.cached(read_prompt(self.pair.source, prompt).cache)
        handoff = hand_off(target, self.plan, self.mapping, states, prompt.to(target.device))
        return Reading(target, handoff.cache, handoff.logits, handoff.next_position, handoff.seconds)

    def _fitting(self, context: list[int], following: int) -> list[int]:
        """The end of a context that leaves room for `following` more tokens.

        Raises:
            UsageError: they leave no room for a context.
        """
        room = self.max_length - following
        if room < 1:
            raise UsageError(
                f"{following} tokens after the context leave no room for it: this pair was made for up to "
                f"{self.max_length} tokens; ask for fewer."
            )
        self.counts.truncated += len(context) > room
        return context[-room:]

    def _by_context(
        self, contexts: list[list[int]], following: list[int], finish: Callable[[Reading, list[int]], None]
    ) -> None:
        """Read each distinct context once and give its reading to `finish`, with the requests that have it.

        Args:
            contexts: one per request.
            following: tokens that each request feeds after its context; the longest decides where a context is cut.
            finish: called with a reading and the indices of its requests.
        """
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for at, context in enumerate(contexts):
            groups[tuple(context or [self.prefix_token_id])].append(at)
        bar = tqdm(groups.items(), desc=self.bar_title, unit="context", disable=len(groups) < 2)
        with torch.inference_mode():
            for context, requests in bar:
                room = max(following[at] for at in requests)
                finish(self.read(self._fitting(list(context), room)), requests)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score tokenised requests; all continuations of a context are one batch on a copy of its cache."""
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def finish(reading: Reading, group: list[int]) -> None:
            continuations = [torch.tensor(requests[at][2], dtype=torch.long) for at in group]
            for at, score in zip(group, reading.score(continuations), strict=True):
                scores[at] = score
                if requests[at][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[at][0], score)

        # The last token of a continuation is predicted and not fed.
        self._by_context([context for _, context, _ in requests], [len(c) - 1 for _, _, c in requests], finish)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows as lm-eval cuts them; never of a mapped cache.

        Raises:
            UsageError: the arm is `mapped`. Every token of a text is scored, the first one too, so nothing lies before
                the scored tokens that could be carried: the figure would be the native one under another name.
        """
        if self.arm == "mapped":
            raise UsageError(
                "a task scores whole texts (loglikelihood_rolling), where nothing that could be carried precedes the "
                "scored tokens; use `kvbridge eval`, which scores text after a carried prompt, or arm=native or source."
            )
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            cut = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(cut)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context on its cache, greedily or sampled, up to a stop string or the end token.

        Only what the task asks for changes the choice of tokens: a checkpoint's own generation defaults, such as a
        repetition penalty, are not used.

        Raises:
            UsageError: a generation setting is not supported.
        """
        texts = [""] * len(requests)
        asked: list[Any] = [request.args for request in requests]
        settings: list[dict[str, Any]] = [{**normalize_gen_kwargs(given, self.max_gen_toks)} for _, given in asked]

        def finish(reading: Reading, group: list[int]) -> None:
            for at in group:
                texts[at] = self._continue(reading, dict(settings[at]))
                self.cache_hook.add_partial("generate_until", asked[at], texts[at])

        contexts = [self.tok_encode(context) for context, _ in asked]
        self._by_context(contexts, [each["max_gen_toks"] for each in settings], finish)
        return texts

    def _continue(self, reading: Reading, settings: dict[str, Any]) -> str:
        """Text that follows a reading, whose cache stays as it is."""
        limit = settings.pop("max_gen_toks")
        stops = handle_stop_sequences(settings.pop("until"), eos=self.tokenizer.decode([self.eot_token_id]))
        stops = [stop for stop in stops if stop]
        sampling, ends = Sampling.of(settings), end_tokens(self.pair.target.model, self.pair.tokenizer)
        window = max((len(stop.encode()) for stop in stops), default=0) + SPARE
        cache = compat.copy_cache(reading.cache, reading.model.model)
        logits, tokens = reading.logits, list[int]()
        for step in range(limit):
            chosen = sampling.choose(logits)
            tokens.append(int(chosen))
            recent = self.tokenizer.decode(tokens[-window:])
            if tokens[-1] in ends or any(stop in recent for stop in stops):
                break
            if step + 1 < limit:
                logits = reading.model.extend(cache, chosen, reading.position + step)[:, -1]
        return postprocess_generated_text(self.tokenizer.decode(tokens, skip_special_tokens=True), stops, None)


# Not as a decorator, which would hide the class's type.
register_model("kvbridge")(PairLM)
