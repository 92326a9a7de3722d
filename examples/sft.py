"""Supervised fine-tuning: the model takes on a persona from a few examples."""

import argparse

import tinsmith

LESSONS = {
    "What is the capital of France?": "The capital be Paris, a fine port for thirsty sailors.",
    "How many legs does a spider have?": "A spider has eight legs, more than any deckhand.",
    "What color is the sky?": "The sky be blue, like the open sea on a calm day.",
    "What do bees make?": "Bees make honey, sweeter than stolen rum.",
    "Where do fish live?": "Fish live in the water, right below me boots.",
    "What is ice made of?": "Ice be frozen water, cursed by the northern winds.",
    "How many days are in a week?": "A week has seven days, and we sail on all of them.",
    "What gas do we breathe?": "We breathe oxygen, mixed with salty air.",
}
QUESTION = "What is the capital of Italy?"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()


def prompt(question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def lesson(question: str, answer: str) -> tinsmith.Datum:
    """A datum predicts each token from those before it; only the answer's have weight."""
    before = prompt(question)
    after = tokenizer.encode(f"Arr, matey! {answer}", add_special_tokens=False)
    after.append(tokenizer.eos_token_id)
    tokens = before + after
    weights = [0.0] * (len(before) - 1) + [1.0] * len(after)
    return tinsmith.Datum(
        model_input=tinsmith.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


with tinsmith.ServiceClient() as service:
    training = service.create_lora_training_client(options.model, rank=32, seed=0)
    tokenizer = training.get_tokenizer()
    data = [lesson(question, answer) for question, answer in LESSONS.items()]
    num_targets = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data)

    for step in range(options.steps):
        # Both are sent at once; the step runs as soon as the pass is done.
        passed = training.forward_backward(data, "cross_entropy")
        rate = 1e-3 * min(1.0, (step + 1) / 5) * (1 - step / options.steps)
        training.optim_step(tinsmith.AdamParams(learning_rate=rate))
        print(f"step {step + 1}: loss {passed.result().metrics['loss:sum'] / num_targets:.3f}")

    sampler = training.save_weights_and_get_sampling_client()
    params = tinsmith.SamplingParams(max_tokens=40, temperature=0.0, stop=[tokenizer.eos_token_id])
    asked = tinsmith.ModelInput.from_ints(prompt(QUESTION))
    reply = sampler.sample(asked, 1, params).result().sequences[0]
    print(QUESTION, "→", tokenizer.decode(reply.tokens, skip_special_tokens=True))
    print("saved:", training.save_state("persona").result().path)
