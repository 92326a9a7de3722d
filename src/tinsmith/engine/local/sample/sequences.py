"""Sampling work in progress: a request, the prefills it needs, and its sequences.

These hold state and know how an answer is put together. Who runs when is decided in `scheduler`.
"""

from __future__ import annotations

import numpy as np

from tinsmith.detokenizer import Detokenize
from tinsmith.engine.base import ExpertsChosen, SampleJob
from tinsmith.engine.grammar import CompiledGrammar
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.inputs import Input
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.choosing import SMALL_TEMPERATURE, fresh_seed
from tinsmith.engine.local.sample.kvcache import BlockTable
from tinsmith.engine.local.sample.prefixes import Realm
from tinsmith.engine.local.sample.prompt_scores import PromptScores
from tinsmith.engine.shaping import Shaper
from tinsmith.engine.stopping import StopRule, StopWatch
from tinsmith.errors import ValidationError
from tinsmith.types import SampledSequence, SampleResponse, StopReason, TopkLogprobs
from tinsmith.types.sampling import MASK_LOGPROB

_DRAWS = 16
"""To draw so many alternatives takes as long as to read a token, at the most."""


class Request:
    """One job while it is worked on."""

    def __init__(
        self,
        job: SampleJob,
        adapter: Adapter | None,
        config: DecoderConfig,
        detokenize: Detokenize | None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """`grammar` is that of the job, compiled."""
        self.job = job
        self.adapter = adapter
        self.realm = Realm(job.scope, adapter)
        self.input = Input(job.prompt, config.images)
        self.prompt = self.input.tokens
        """Its tokens; parts of images are below zero, and of one image the same."""
        # A state cannot be taken back by a token. The last one is therefore left to each sequence's
        # first decode step, and what prefill leaves serves the same prompt again, and longer ones.
        self.num_prefilled = len(self.prompt) - (1 if config.state is not None else 0)
        """How many of the prompt's tokens prefill reads."""
        room = config.max_context_length - len(self.prompt)
        if room < 0:
            raise ValidationError(
                f"{len(self.prompt)} tokens do not fit the context of {config.max_context_length}",
                "prompt",
            )
        if not len(self.prompt):
            raise ValidationError("an empty prompt gives nothing to continue", "prompt")
        if self.prompt[-1] < 0 and config.state is not None:
            raise ValidationError("this model needs text behind the last image", "prompt")
        self.rule = StopRule.of(job.params, config.eos_token_ids, room)
        if self.rule.strings and detokenize is None:
            raise ValidationError(
                "stop strings need the model's tokenizer, which was not found; use token ids",
                "sampling_params.stop",
            )
        self.seed = fresh_seed() if job.params.seed is None else job.params.seed % 2**64
        self._image_token = 0 if config.images is None else config.images.token_id
        self.scores = PromptScores(job, self.input.text_tokens(self._image_token), self.seed)
        self.num_cache_hits = 0
        self.prompt_choices: np.ndarray | None = None
        """The experts that its prompt's tokens went to, once prefill has read them, where the job
        asks for them: (T, E, k)."""
        params = job.params
        is_cut = 0 < params.top_k < config.vocab_size or params.top_p < 1.0
        is_small = 0 < params.temperature < SMALL_TEMPERATURE
        is_plain = params.temperature == 0 or not (is_cut or is_small)
        self.draws_whole = is_plain and job.shaping is None and job.topk_sample_logprobs <= 0
        """Whether each token is drawn from the whole distribution and nothing more is asked."""
        self._detokenize = detokenize
        self._matcher = None if grammar is None else grammar.start(self.rule.token_ids)
        self._sequences: list[Sequence] = []

    @property
    def scope(self) -> str:
        return self.job.scope

    @property
    def has_sequences(self) -> bool:
        """Whether its sequences were needed so far."""
        return bool(self._sequences)

    @property
    def sequences(self) -> list[Sequence]:
        self.prepare()
        return self._sequences

    def prepare(self) -> None:
        """Make its sequences, if they are not there: when its prompt is read, for a request may ask
        for thousands, and wait for long among thousands of others."""
        if not self._sequences:
            prompt = self.input.text_tokens(self._image_token).tolist()
            shaping, text = self.job.shaping, self.prompt[self.prompt >= 0]
            shaper = None if shaping is None else Shaper(shaping, text, self._matcher)
            self._sequences = [
                Sequence(
                    self,
                    index,
                    StopWatch(self.rule, self._detokenize, prompt),
                    None if shaper is None else shaper.copy(),
                )
                for index in range(self.job.num_samples)
            ]

    @property
    def is_finished(self) -> bool:
        return all(sequence.stop_reason is not None for sequence in self.sequences)

    def experts_chosen(self) -> ExpertsChosen | None:
        """What the job asked to be told about experts; None where the model has none to tell of."""
        prompt = self.prompt_choices
        if prompt is None:
            return None
        return ExpertsChosen(prompt, tuple(each.choices_after(prompt) for each in self.sequences))

    def response(self) -> SampleResponse:
        return SampleResponse(
            sequences=[sequence.result() for sequence in self.sequences],
            prompt_logprobs_np=self.scores.logprobs,
            topk_prompt_logprobs_np=self.scores.topk,
            target_prompt_logprobs=self.scores.targets,
            prompt_cache_hit_tokens=self.num_cache_hits,
            prompt_alt_tokens=self.scores.alternatives,
        )


class Sequence:
    """One sample of a request."""

    def __init__(
        self, request: Request, index: int, watch: StopWatch, shaper: Shaper | None = None
    ) -> None:
        self.request = request
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop_reason: StopReason | None = None
        self.shaper = shaper
        self.num_ahead = 0
        """Tokens that a device has been asked for, and that are not known here yet."""
        self.attempt = 0
        """Counts how often it lost its blocks: what was asked for before that is void."""
        self.table: BlockTable | None = None
        """What the cache holds for it, once its prompt has been read."""
        self._choices: list[np.ndarray] = []
        """The experts that tokens behind the prompt's went to, of those that were noted."""
        self._watch = watch
        self._top: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def last_token(self) -> int:
        """What the next decode step reads."""
        return self.tokens[-1] if self.tokens else int(self.request.prompt[-1])

    @property
    def goes_on(self) -> bool:
        """Whether there is a token to be asked for, as far as is known."""
        num_tokens = len(self.tokens) + self.num_ahead
        return self.table is not None and num_tokens < self.request.rule.max_tokens

    @property
    def num_past(self) -> int:
        """How many tokens the cache holds for it."""
        assert self.table is not None
        return self.table.num_tokens

    @property
    def problem(self) -> str | None:
        """Why its grammar cannot be followed further."""
        matcher = None if self.shaper is None else self.shaper.matcher
        return None if matcher is None else matcher.problem

    @property
    def is_grammar_at_end(self) -> bool:
        """Whether its text is complete and cannot go on, and no token says so."""
        matcher = None if self.shaper is None else self.shaper.matcher
        return matcher is not None and matcher.is_at_end

    @property
    def position(self) -> int:
        """Where the token is that the next decode step reads."""
        return self.num_past + self.request.input.shift

    def note_choices(self) -> None:
        """Take down the experts of its tokens, before it leaves its blocks. Those that it had been
        to before it gave way stay: with these its tokens were drawn."""
        prompt, table = self.request.prompt_choices, self.table
        if prompt is None or table is None:
            return
        known = len(prompt) + sum(map(len, self._choices))
        # A device that is ahead may have read the last token too.
        stop = min(table.num_tokens, len(self.request.prompt) + len(self.tokens) - 1)
        if stop > known:
            self._choices.append(table.cache.read_choices(table, known, stop))

    def choices_after(self, prompt: np.ndarray) -> np.ndarray:
        """The experts of its tokens behind those of the prompt."""
        return np.concatenate([prompt[:0], *self._choices])

    def add(self, token: int, logprob: float, top: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Take the next token; `stop_reason` says afterwards whether it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.shaper is not None:
            self.shaper.see(token)
        if top is not None:
            self._top.append(top)
        self.stop_reason = self._watch.see(token)
        if self.stop_reason is None and self.is_grammar_at_end:
            self.stop_reason = "stop"

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None
        job = self.request.job
        return SampledSequence(
            stop_reason=self.stop_reason,
            sequence_id=f"{job.job_id}:{self.index}",
            tokens_np=np.array(self.tokens, dtype=np.int32),
            logprobs_np=np.array(self.logprobs, dtype=np.float32),
            topk_logprobs_np=self.topk(job.topk_sample_logprobs, first=0),
        )

    def topk(self, k: int, *, first: int) -> TopkLogprobs | None:
        """The likeliest tokens from position `first` on."""
        if k <= 0:
            return None
        top = self._top[first:]
        token_ids = np.zeros((len(top), k), dtype=np.int32)
        logprobs = np.full((len(top), k), MASK_LOGPROB, dtype=np.float32)
        for row, (ids, values) in enumerate(top):
            token_ids[row, : len(ids)] = ids
            logprobs[row, : len(values)] = values
        return TopkLogprobs(token_ids, logprobs)


class Prefill:
    """Tokens to be read before the next one can be chosen, for one or more sequences.

    Fresh, these are a request's prompt and all of its samples; after a sequence had to give way,
    its prompt and what it had sampled.
    """

    def __init__(self, request: Request, resumed: Sequence | None = None) -> None:
        """`resumed` is the sequence that had to give way."""
        self.request = request
        self._resumed = resumed
        self.is_fresh = resumed is None or not resumed.tokens
        sampled = np.array([] if resumed is None else resumed.tokens, dtype=request.prompt.dtype)
        whole = np.concatenate([request.prompt, sampled])
        self.decides_next = request.num_prefilled == len(request.prompt)
        """Whether its last row chooses the sequences' next tokens; else decode steps do."""
        self.tokens = whole if self.decides_next else whole[:-1]
        self.first_token = int(whole[0])
        self.table: BlockTable | None = None
        self.num_done = 0

    @property
    def sequences(self) -> list[Sequence]:
        return self.request.sequences if self._resumed is None else [self._resumed]

    @property
    def num_sequences(self) -> int:
        return self.request.job.num_samples if self._resumed is None else 1

    @property
    def token_cost(self) -> int:
        """As how many tokens one counts that is read: alternatives may be drawn from each."""
        return 1 + (self.request.job.prompt_alt_tokens_k // _DRAWS if self.is_fresh else 0)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_done

    @property
    def reusable(self) -> int:
        """How many tokens need not be computed if the cache has them."""
        last = len(self.tokens) - 1 if self.decides_next else len(self.tokens)
        return min(last, self.request.scores.first_row) if self.is_fresh else last
