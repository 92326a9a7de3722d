"""Reinforcement learning: of a group of answers, those better than its mean become likelier."""

from datums import draw, options, sampled, step, tokenizer, training

PROMPT = "A word with an e:"

for number in range(options.steps):
    sampler = training.save_weights_and_get_sampling_client()
    answers = draw(sampler, PROMPT, 8)
    rewards = [tokenizer.decode(each.tokens).count("e") for each in answers]
    mean = sum(rewards) / len(rewards)
    scored = zip(answers, rewards, strict=True)
    step(
        [sampled(PROMPT, each, [r - mean] * len(each.tokens)) for each, r in scored],
        "importance_sampling",
    )
    print(f"step {number + 1}: mean reward {mean:.2f}")
