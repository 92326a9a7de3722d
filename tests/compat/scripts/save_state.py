"""Creates a model, saves it, and prints where."""

import tinker

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="tinsmith/fake", rank=4)
print(client.save_state("a").result().path)
