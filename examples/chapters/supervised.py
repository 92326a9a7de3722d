"""Supervised learning: the model learns answers from examples."""

from datums import answer, draw, options, step, tokenizer, training

PAIRS = {"What do bees make?\n": "Honey, arr!", "Where do fish live?\n": "In the sea, arr!"}

data = [answer(question, reply) for question, reply in PAIRS.items()]
for number in range(options.steps):
    print(f"step {number + 1}: loss {step(data, 'cross_entropy', 1e-3):.3f}")
sampler = training.save_weights_and_get_sampling_client()
print(tokenizer.decode(draw(sampler, "What do cows eat?\n", 1)[0].tokens))
