"""Prompt distillation: answers given under an instruction are learned without it."""

from datums import answer, draw, options, service, step, tokenizer

INSTRUCTION = "You are a pirate. "
QUESTIONS = ["What do bees make?\n", "Where do fish live?\n"]

teacher = service.create_sampling_client(base_model=options.model)
instructed = [draw(teacher, INSTRUCTION + question, 1)[0].tokens for question in QUESTIONS]
texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in instructed]
data = [answer(question, text) for question, text in zip(QUESTIONS, texts, strict=True)]
for number in range(options.steps):
    print(f"step {number + 1}: loss {step(data, 'cross_entropy', 1e-3):.3f}")
