"""On-policy distillation: the student writes, and the teacher's opinion rewards each token."""

from datums import draw, options, sampled, service, step, tokens_of, training

import tinsmith

PROMPT = "The sea is"

teacher = service.create_sampling_client(base_model=options.model)
for number in range(options.steps):
    data, gap = [], 0.0
    for each in draw(training.save_weights_and_get_sampling_client(), PROMPT, 4):
        whole = tinsmith.ModelInput.from_ints(tokens_of(PROMPT) + each.tokens)
        wanted = teacher.compute_logprobs(whole).result()[len(tokens_of(PROMPT)) :]
        # The reverse KL divergence, token by token.
        kl = [mine - (its or 0.0) for mine, its in zip(each.logprobs or [], wanted, strict=True)]
        data.append(sampled(PROMPT, each, [-value for value in kl]))
        gap += sum(kl) / len(kl) / 4
    step(data, "importance_sampling")
    print(f"step {number + 1}: KL to the teacher {gap:.4f}")
