"""Rubrics: another model reads each answer, and how likely it finds a yes is the reward."""

from datums import draw, options, sampled, service, step, tokenizer, tokens_of, training

import tinsmith

PROMPT = "Thank me in one sentence: "

judge = service.create_sampling_client(base_model=options.model)
for number in range(options.steps):
    answers = draw(training.save_weights_and_get_sampling_client(), PROMPT, 4)
    asked = [f"{tokenizer.decode(a.tokens)}\nIs this polite? yes" for a in answers]
    inputs = [tinsmith.ModelInput.from_ints(tokens_of(text)) for text in asked]
    rewards = [judge.compute_logprobs(each).result()[-1] or 0.0 for each in inputs]
    mean = sum(rewards) / len(rewards)
    scored = zip(answers, rewards, strict=True)
    step([sampled(PROMPT, a, [r - mean] * len(a.tokens)) for a, r in scored], "importance_sampling")
    print(f"step {number + 1}: mean verdict {mean:.3f}")
