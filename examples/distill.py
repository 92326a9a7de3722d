"""Distillation from the teacher's likeliest tokens: a long instruction moves into the weights.

The teacher is the base model with an instruction before the question; the student sees the
question alone. At each token of an answer the student learns the teacher's top-k probabilities,
which say more than the one token that was drawn.
"""

import argparse
import math

import tinsmith

INSTRUCTION = "You are a grumpy wizard. Answer in one short, grumpy sentence."
QUESTIONS = [
    "What is the sun?",
    "Why is the sea salty?",
    "What do cats want?",
    "How is bread made?",
]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--top-k", type=int, default=5)
options = parser.parse_args()


def prompt(question: str, system: str | None = None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def lesson(question: str) -> tinsmith.Datum:
    """The teacher's answer, with its probabilities for each token, as the student shall give it."""
    instructed = prompt(question, INSTRUCTION)
    params = tinsmith.SamplingParams(max_tokens=24, temperature=0.7, seed=1)
    drawn = teacher.sample(tinsmith.ModelInput.from_ints(instructed), 1, params).result()
    answer = drawn.sequences[0].tokens
    scored = teacher.sample(
        tinsmith.ModelInput.from_ints(instructed + answer),
        1,
        tinsmith.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=options.top_k,
    ).result()

    asked = prompt(question)
    # Positions of the question teach nothing: any token will do there, with weight zero.
    targets = [[0] * options.top_k for _ in asked[1:]]
    weights = [[0.0] * options.top_k for _ in asked[1:]]
    assert scored.topk_prompt_logprobs is not None
    for choices in scored.topk_prompt_logprobs[len(instructed) :]:
        assert choices is not None
        probabilities = [math.exp(logprob) for _, logprob in choices]
        targets.append([token for token, _ in choices])
        weights.append([each / sum(probabilities) for each in probabilities])
    return tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints((asked + answer)[:-1]),
        loss_fn_inputs={
            "target_tokens": tinsmith.TensorData(
                data=[token for row in targets for token in row],
                dtype="int64",
                shape=[len(targets), options.top_k],
            ),
            "weights": tinsmith.TensorData(
                data=[weight for row in weights for weight in row],
                dtype="float32",
                shape=[len(weights), options.top_k],
            ),
        },
    )


with tinsmith.ServiceClient() as service:
    student = service.create_lora_training_client(options.model, rank=32, seed=0)
    tokenizer = student.get_tokenizer()
    teacher = service.create_sampling_client(base_model=options.model)
    data = [lesson(question) for question in QUESTIONS]
    num_learned = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data)

    for step in range(options.steps):
        passed = student.forward_backward(data, "cross_entropy")
        student.optim_step(tinsmith.AdamParams(learning_rate=5e-4))
        loss = passed.result().metrics["loss:sum"] / num_learned
        print(f"step {step + 1}: loss {loss:.3f}", flush=True)

    sampler = student.save_weights_and_get_sampling_client()
    asked = tinsmith.ModelInput.from_ints(prompt("What is the moon?"))
    params = tinsmith.SamplingParams(max_tokens=30, temperature=0.0)
    reply = sampler.sample(asked, 1, params).result().sequences[0]
    print("What is the moon? →", tokenizer.decode(reply.tokens, skip_special_tokens=True))
