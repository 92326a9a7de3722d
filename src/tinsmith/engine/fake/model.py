"""A toy language model in numpy: how likely a token is depends on the token before it alone.

This is what the fake engine trains and samples: it learns what it is shown, is exact under save and
restore, and takes microseconds. Tokens are sorted into classes (their id modulo the number of
classes), previous tokens into contexts likewise; all tokens of a class are equally likely. With
up to `MAX_CLASSES` tokens every token is a class of its own.

Legend: C contexts, K classes, N positions. Everything is float64, so that sums of gradients are
the same to the last bit wherever a batch is cut.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.engine.optimizer import (
    check_adam_params,
    check_gradient_norm,
    check_update_norm,
    step_metrics,
)
from tinsmith.errors import ValidationError
from tinsmith.types import AdamParams, LoraConfig

Array = npt.NDArray[Any]

MAX_CONTEXTS = 32
MAX_CLASSES = 256


class Bigram:
    """A base model: a fixed table of logits, drawn from its name."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.num_contexts = min(MAX_CONTEXTS, vocab_size)
        self.num_classes = min(MAX_CLASSES, vocab_size)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        self._logits = random.standard_normal((self.num_contexts, self.num_classes))
        self._class_of = np.arange(vocab_size) % self.num_classes
        self._log_sizes = np.log(np.bincount(self._class_of))
        self.own_logprobs = self.logprobs()
        """(C, K): those of the model without an adapter."""

    def logprobs(self, change: Array | None = None) -> Array:
        """(C, K): log-probability of one token of a class after a context."""
        logits = self._logits if change is None else self._logits + change
        weighted = logits + self._log_sizes
        peak = weighted.max(axis=1, keepdims=True)
        total: Array = peak + np.log(np.exp(weighted - peak).sum(axis=1, keepdims=True))
        return logits - total

    def class_probabilities(self, logprobs: Array) -> Array:
        """(C, K): probability of a class after a context, all of its tokens together."""
        probabilities: Array = np.exp(logprobs + self._log_sizes)
        return probabilities

    def cells(self, previous: Array, tokens: Array) -> Array:
        """Where (previous, token) is in a flattened (C, K) table; the arguments broadcast."""
        cells: Array = (previous % self.num_contexts) * self.num_classes + (
            tokens % self.num_classes
        )
        return cells

    def row(self, logprobs: Array, previous: int) -> Array:
        """(vocabulary,): log-probability of every token after `previous`."""
        row: Array = logprobs[previous % self.num_contexts][self._class_of]
        return row


class BigramAdapter:
    """What training changes: a table added to the base model's logits.

    A cell's gain lets it learn at the rates that are usual for LoRA. The seed varies the gains a
    little, so that seeds matter as they do there: not at the start, where every adapter equals
    the base model, but in where training goes.
    """

    def __init__(self, model: Bigram, lora: LoraConfig) -> None:
        self.model = model
        self.lora = lora
        shape = (model.num_contexts, model.num_classes)
        self.gain = np.random.default_rng(lora.seed or 0).uniform(20.0, 30.0, shape)
        self.weights = np.zeros(shape)
        self.grad: Array | None = None
        self.exp_avg: Array | None = None
        self.exp_avg_sq: Array | None = None
        self.step = 0

    def logprobs(self) -> Array:
        """(C, K) table of the base model with this adapter."""
        return self.model.logprobs(self.gain * self.weights)

    def gradient(self, logprobs: Array, cells: Array, slopes: Array) -> Array:
        """(C, K): gradient of a loss whose slope by the log-probability of `cells` is `slopes`."""
        shape = self.weights.shape
        pull = np.bincount(cells.ravel(), slopes.ravel(), self.weights.size).reshape(shape)
        total = pull.sum(axis=1, keepdims=True)
        gradient: Array = self.gain * (pull - total * self.model.class_probabilities(logprobs))
        return gradient

    def accumulate(self, gradient: Array) -> None:
        self.grad = gradient if self.grad is None else self.grad + gradient

    def take_step(self, params: AdamParams) -> dict[str, float]:
        """AdamW with bias correction, decoupled decay and clipping by the global norm."""
        check_adam_params(params)
        if self.grad is None and self.exp_avg is None and not params.weight_decay:
            self.step += 1  # nothing has been learnt yet: nothing moves
            return step_metrics(params, self.step, 0.0, 0.0)
        grad = np.zeros_like(self.weights) if self.grad is None else self.grad
        grad_norm = float(np.linalg.norm(grad))
        try:
            check_gradient_norm(grad_norm, self.step)
        except ValidationError:
            self.grad = None
            raise
        if params.grad_clip_norm > 0 and grad_norm > params.grad_clip_norm:
            grad = grad * (params.grad_clip_norm / grad_norm)
        mean = np.zeros_like(grad) if self.exp_avg is None else self.exp_avg
        square = np.zeros_like(grad) if self.exp_avg_sq is None else self.exp_avg_sq
        mean = params.beta1 * mean + (1 - params.beta1) * grad
        square = params.beta2 * square + (1 - params.beta2) * grad**2
        # In place from here on: pages of fresh memory cost more than the numbers in them.
        divisor = square / (1 - params.beta2 ** (self.step + 1))
        np.sqrt(divisor, out=divisor)
        divisor += params.eps
        update = mean / (1 - params.beta1 ** (self.step + 1))
        update /= divisor
        if params.weight_decay:
            update += params.weight_decay * self.weights
        update *= params.learning_rate
        update_norm = float(np.linalg.norm(update))
        check_update_norm(update_norm, params, self.step)
        self.weights = self.weights - update
        self.exp_avg, self.exp_avg_sq, self.grad = mean, square, None
        self.step += 1
        return step_metrics(params, self.step, grad_norm, update_norm)
