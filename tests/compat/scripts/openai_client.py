"""What a program with any major version of the `openai` package does; prints what it found."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel


class Answer(BaseModel):
    a: Literal["x", "y"]
    ok: bool


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["a", "ok"],
    "additionalProperties": False,
}
client = openai.OpenAI(
    base_url=os.environ["TINKER_BASE_URL"] + "/oai/api/v1",
    api_key=os.environ["TINKER_API_KEY"],
    max_retries=0,
)
ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
chat = client.chat.completions.create(**ask, response_format=form)
stream = client.chat.completions.create(**ask, response_format=form, stream=True)
parsed = client.chat.completions.parse(**ask, response_format=Answer, max_tokens=60)
response = client.responses.parse(model="tiny", input="hi", text_format=Answer)
events = client.responses.create(model="tiny", input="hi", max_output_tokens=4, stream=True)
try:
    client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    refused = ""
except openai.BadRequestError as error:
    refused = error.body["message"]
found = {
    "version": openai.__version__,
    "chat": chat.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
    "parsed": parsed.choices[0].message.parsed.model_dump(),
    "response": response.output_parsed.model_dump(),
    "events": [event.type for event in events],
    "refused": refused,
}
print(json.dumps(found))
