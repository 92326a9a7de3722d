"""Creates a model, saves it, and prints where."""

import os

import tinker

MODEL = os.environ.get("MODEL", "tinsmith/fake")
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=MODEL, rank=4)
print(client.save_state("a").result().path)
