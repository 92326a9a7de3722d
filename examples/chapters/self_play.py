"""Self-play: one model writes both sides of a game, and learns from who wins."""

from datums import draw, options, sampled, step, tokenizer, training

PROMPT = "Name a number below 100, as large as you dare: "

for number in range(options.steps):
    sampler = training.save_weights_and_get_sampling_client()
    players = draw(sampler, PROMPT, 8, max_tokens=4)
    scores = [sum(map(str.isdigit, tokenizer.decode(each.tokens))) for each in players]
    data = []
    for one, other in ((0, 1), (2, 3), (4, 5), (6, 7)):
        won = (scores[one] > scores[other]) - (scores[one] < scores[other])
        for player, reward in ((players[one], won), (players[other], -won)):
            data.append(sampled(PROMPT, player, [float(reward)] * len(player.tokens)))
    step(data, "importance_sampling")
    print(f"step {number + 1}: mean score {sum(scores) / len(scores):.2f}")
