"""A server whose model reads images: the official client trains on one, OpenAI's shows one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import ended_well
from tests.support.server_process import ServerProcess, serving
from tests.support.tiny_vision import IMAGE_TOKEN, image_bytes

pytest.importorskip("torch", reason="the local engine needs torch")
openai = pytest.importorskip("openai", reason="the openai package is not installed")
anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
pytestmark = pytest.mark.slow

IMAGE = image_bytes(24, 16)
"""Three cells by two."""

GREEDY = {"temperature": 0}

# Token 90 of the tiny tokenizer, which stands for an image, is the letter w.
TEMPLATE = """\
{% for message in messages %}{{ message.role[0] }}:
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}w{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}a:{% endif %}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    from tests.engine.conftest import save_tokenizer
    from tests.support.tiny_vision import save_tiny_vision

    folder = tmp_path_factory.mktemp("seeing")
    save_tiny_vision("qwen3_vl", folder / "model")
    save_tokenizer(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    engine = ("--engine", "local", "--device", "cpu", "--deterministic")
    options = (*engine, "--model", f"tiny={folder / 'model'}", "--set", "snapshot_steps=3")
    with serving(folder, *options) as server:
        yield server


def test_training_on_images_survives_a_killed_server_bit_for_bit(
    server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(IMAGE)
    undisturbed = server.run("image_training.py", "8", str(path)).splitlines()
    assert len(undisturbed) == 9
    child = server.start_script("image_training.py", "8", str(path))
    lines = child.out.take(2)
    server.kill()
    server.start()
    rest, errors = child.finish(90)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed


def test_chats_show_images(server: ServerProcess) -> None:
    """Both APIs count the image's six tokens, and read the same prompt."""
    data = base64.b64encode(IMAGE).decode()
    with openai.OpenAI(
        base_url=f"{server.url}/oai/api/v1", api_key=server.key, max_retries=0
    ) as client:
        uri = {"url": f"data:image/png;base64,{data}"}
        parts: list[Any] = [{"type": "text", "text": "is"}, {"type": "image_url", "image_url": uri}]
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "extra_body": GREEDY}
        messages: list[Any] = [{"role": "user", "content": parts}]
        whole = client.chat.completions.create(**asked, messages=messages)
        assert whole.usage is not None and whole.usage.prompt_tokens == len("u:is" + "a:") + 6
        told = client.chat.completions.create(
            **{**asked, "extra_body": {**GREEDY, "return_token_ids": True}}, messages=messages
        )
        assert (told.prompt_token_ids or []).count(IMAGE_TOKEN) == 6
        uri["url"] = "https://example.org/image.png"
        with pytest.raises(openai.BadRequestError, match="this server fetches nothing"):
            client.chat.completions.create(**asked, messages=messages)
    with anthropic.Anthropic(
        base_url=f"{server.url}/anthropic", api_key=server.key, max_retries=0
    ) as client:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        blocks: list[Any] = [{"type": "text", "text": "is"}, {"type": "image", "source": source}]
        messages = [{"role": "user", "content": blocks}]
        said = client.messages.create(**asked, messages=messages)
        assert said.usage.input_tokens == whole.usage.prompt_tokens
        assert said.content[0].text == whole.choices[0].message.content
        counted = client.messages.count_tokens(model="tiny", messages=messages)
        assert counted.input_tokens == said.usage.input_tokens
